"""`localllm cache`: on a folder alone, on a model loaded here, and on one in a running server."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.cli.cache.prompt_file import read_request
from localllm.cli.output import Notes
from localllm.errors import Unavailable, UsageError
from localllm.models import hashes
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.kv.blocks import NO_ROOT
from localllm.runtime.kv.explain import Warmed
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.service import Service
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions, GenerationRequest
from localllm.worker import registry
from localllm.worker.description import config_to_wire
from localllm.worker.lifecycle import ModelEntry, ModelState
from tests.cli.conftest import Opened, Result
from tests.fake_engine import SPEC, FakeEngine, fake_service
from tests.server.fakes import FakeWorker
from tests.worker.local import FileSupervisor, Local, listening, supervisor_of

Cli = Callable[..., Result]
TOKENS = list(range(40, 140)) + [7] * 60


def _fill(tokens: Sequence[int] = TOKENS) -> Path:
    """Write a sequence into the default folder: by default 160 tokens, two whole blocks and a half."""
    folder = Path(os.environ["LOCALLLM_HOME"]) / "kv"
    config = TierConfig(ram_bytes=0, disk_dir=str(folder), disk_bytes=1 << 24)
    tiers = Tiers(config, spec=SPEC, model_name="fake-model", can_write_disk=True)
    chain = tiers.look_up(NO_ROOT, tokens).chain
    for start in range(0, len(tokens), 64):
        block = chain.block(tokens, start, min(start + 64, len(tokens)))
        tiers.put(block, b"\x07" * 1000, Note(prefix_tokens=2000))
    tiers.close()
    return folder


def test_an_empty_folder(cli: Cli) -> None:
    assert cli("cache", "ls", "--json").json()["prefixes"] == []
    assert cli("cache", "stats", "--json").json()["disk"]["n_blocks"] == 0
    assert cli("cache", "clear").code == 0


def test_what_lies_there_is_listed_by_prefix_and_without_text(cli: Cli) -> None:
    _fill()
    [kept] = cli("cache", "ls", "--json").json()["prefixes"]
    assert (kept["model"], kept["n_tokens"], kept["is_pinned"]) == ("fake-model", 160, False)
    assert kept["n_bytes"] > 3000
    told = cli("cache", "ls")
    assert told.out.splitlines()[1].split()[:2] == ["fake-model", "160"]


def test_what_beginnings_share_is_said_to_lie_on_disk_once(cli: Cli) -> None:
    once = "what beginnings share counts in each, and lies on disk once"
    folder = _fill()
    assert once not in cli("cache", "ls").err
    _fill(TOKENS[:64] + [9] * 64)
    assert once in cli("cache", "ls").err
    listed = cli("cache", "ls", "--json").json()["prefixes"]
    on_disk = sum(path.stat().st_size for path in folder.rglob("*.kv"))
    assert (len(listed), sum(one["n_bytes"] for one in listed) > on_disk) == (2, True)


def test_stats_count_the_folder(cli: Cli) -> None:
    folder = _fill()
    disk = cli("cache", "stats", "--json").json()["disk"]
    assert (disk["folder"], disk["n_blocks"]) == (str(folder), 3)
    assert disk["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.kv")) == disk["written_today_bytes"]
    told = cli("cache", "stats")
    assert "3 blocks" in told.out
    assert "written today" in told.out


def test_clear_leaves_no_block(cli: Cli) -> None:
    folder = _fill()
    assert cli("cache", "clear", "--json").json()["disk"]["n_blocks"] == 3
    assert not list(folder.rglob("*.kv"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no text"),
        ('{"messages": []}', "no messages"),
        ('{"prompt": ["one", "two"]}', "one prompt"),
        ('{"prompt": "x", "grammar": "root"}', "grammar"),
        ('{"prompt": "x", "cache": "sometimes"}', "cache"),
        ('{"messages": [3]}', "is no request"),
        ('{"prompt": 3}', "is no request"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused_before_anything_is_loaded(
    cli: Cli, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "f").write_text(text)
    told = cli("cache", "explain", "nothing", str(tmp_path / "f"))
    assert told.code == 2
    assert words in told.err


@pytest.mark.real
def test_warmed_text_is_found_by_the_next_process(cli: Cli, tmp_path: Path, smollm2: Path) -> None:
    from localllm.models.hashes import sha256_of

    sha256_of(smollm2)  # KV of a file without a known hash stays off the disk
    document = tmp_path / "doc.txt"
    document.write_text("".join(f"Rule {i}: be kind to number {i}.\n" for i in range(12)))
    warmed = cli("cache", "warm", str(smollm2), str(document), "--threads", "1", "--json").json()
    assert warmed["is_pinned"] is True
    assert warmed["n_computed_tokens"] == warmed["n_tokens"] == warmed["kept_tokens"]["disk"]
    told = cli("cache", "explain", str(smollm2), str(document), "--threads", "1", "--json").json()
    assert told["known_tokens"]["disk"] >= warmed["n_tokens"] - 4  # where the user's turn would begin
    assert cli("cache", "ls", "--json").json()["prefixes"][0]["is_pinned"] is True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def local(file: Path) -> Iterator[Local]:
    with listening(supervisor_of(file, config=LoadConfig(parallel=4))) as local:
        yield local


def test_a_model_in_a_server_is_warmed_explained_counted_and_cleared_there(
    cli: Cli, opened: Opened, local: Local, file: Path
) -> None:
    document = "Rule one: be kind. Rule two: say what you know. " * 4
    before = cli("cache", "explain", str(file), "-", "--json", stdin=document).json()
    assert (before["n_known_tokens"], before["reason"]) == (0, "never_seen")
    assert before["diverges_at"]["position"] == 0
    warmed = cli("cache", "warm", str(file), "-", "--json", stdin=document).json()
    assert warmed["n_tokens"] == warmed["n_computed_tokens"] > len(document) / 2
    asked = json.dumps({"messages": [{"role": "system", "content": document}, {"role": "user", "content": "which?"}]})
    after = cli("cache", "explain", str(file), "-", stdin=asked)
    assert f"{warmed['n_tokens']} tokens (" in after.out
    assert "'which?" in after.out or "which?" in after.out
    [model] = cli("cache", "stats", "--json").json()["models"]
    assert (model["model"], model["prompt_tokens"]["computed"]) == ("fake", warmed["n_tokens"])
    assert "cells" in cli("cache", "clear").err
    assert cli("cache", "explain", str(file), "-", "--json", stdin=document).json()["n_known_tokens"] == 0
    assert opened.calls == []


def test_a_model_that_cannot_be_asked_is_named_and_the_rest_is_told(cli: Cli, local: Local) -> None:
    local.worker.fails["cache_stats"] = Unavailable("It hangs.")
    told = cli("cache", "stats", "--json")
    assert told.json()["models"] == []
    assert "fake at http://127.0.0.1:8080: It hangs." in told.err


def test_a_model_that_cannot_be_cleared_is_named_and_the_others_are_cleared(cli: Cli, file: Path) -> None:
    folder, model = _fill(), {"path": str(file)}
    workers = [FakeWorker(name, fake_service(), model=model) for name in ("first", "hung", "last")]
    workers[1].fails["clear_cache"] = Unavailable("It hangs.")
    with listening(FileSupervisor(*workers)):
        told = cli("cache", "clear", "--json")
    assert told.code == 1
    assert "hung at http://127.0.0.1:8080: It hangs." in told.err
    assert "Not cleared: hung at http://127.0.0.1:8080." in told.err
    found = told.json()
    assert [model["model"] for model in found["models"]] == ["first", "last"]
    assert found["not_cleared"] == ["hung at http://127.0.0.1:8080"]
    assert not list(folder.rglob("*.kv"))


def test_a_model_whose_file_was_changed_or_deleted_is_cleared(cli: Cli, local: Local, file: Path) -> None:
    local.server.supervisor.is_changed = True  # type: ignore[attr-defined]
    file.unlink()
    told = cli("cache", "clear", "--json")
    assert told.code == 0
    assert [model["model"] for model in told.json()["models"]] == ["fake"]
    assert [model["model"] for model in cli("cache", "stats", "--json").json()["models"]] == ["fake"]


def test_clear_waits_for_models_that_are_being_unloaded(
    cli: Cli, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, supervisor = _fill(), local.server.supervisor
    states, real, seen = [ModelState.STOPPING] * 3, supervisor.entries, list[int]()

    def entries() -> list[ModelEntry]:
        seen.append(len(list(folder.rglob("*.kv"))))
        state = states.pop() if states else ModelState.UNLOADED
        return [replace(entry, state=state, model={}) for entry in real()]

    monkeypatch.setattr(supervisor, "entries", entries)
    assert cli("cache", "clear").code == 0
    assert states == []
    assert set(seen) == {3}, "nothing is deleted before they have ended"
    assert not list(folder.rglob("*.kv"))
    states.extend([ModelState.STOPPING] * 100)
    monkeypatch.setattr("localllm.cli.cache.models._STOPPING_S", 0.2)
    told = cli("cache", "clear")
    assert told.code == 1
    assert "Not cleared: fake at http://127.0.0.1:8080." in told.err


def test_what_cannot_be_deleted_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _fill()

    def refuses(path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuses)
        told = cli("cache", "clear")
    assert told.code == 1
    assert f"Not cleared: 3 files in {folder}." in told.err


@pytest.mark.parametrize("how", ["a file", "a failing disk"])
def test_clear_says_what_was_cleared_where_the_folder_cannot_be(
    cli: Cli, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "kv"
    monkeypatch.setenv("LOCALLLM_KV_DIR", str(folder))
    if how == "a file":
        folder.write_text("")
    else:
        real = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: _broken() if Path(path) == folder else real(path))
    why = {"a file": "it is a file", "a failing disk": "Input/output error"}[how]
    told = cli("cache", "clear")
    assert told.code == 1
    assert "fake at http://127.0.0.1:8080:" in told.err
    assert f"error: Not cleared: {folder} cannot be used: {why}." in told.err
    assert "hint: export LOCALLLM_KV_DIR=/a/folder" in told.err
    found = cli("cache", "clear", "--json").json()
    assert [model["model"] for model in found["models"]] == ["fake"]
    assert found["not_cleared"] == [f"{folder} cannot be used: {why}"]


def _broken() -> list[str]:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("verb", ["stats", "ls"])
def test_a_folder_that_cannot_be_used_is_told_of(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("LOCALLLM_KV_DIR", str(tmp_path / "kv"))
    assert "cannot be used" not in cli("cache", verb).err
    (tmp_path / "kv").write_text("")
    what = f"{tmp_path / 'kv'} cannot be used: it is a file"
    assert f"note: {what} (export LOCALLLM_KV_DIR=/a/folder)" in cli("cache", verb).err
    told = cli("cache", verb, "--json").json()
    assert (told["disk"] if verb == "stats" else told)["problem"] == what


def test_a_model_that_no_server_holds_is_loaded_here(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    told = cli("cache", "explain", "some-model", "-", "--json", "--ctx", "2048", stdin="be kind")
    assert told.json()["n_known_tokens"] == 0
    [(name, config, _)] = opened.calls
    assert (name, config.ctx) == ("some-model", 2048)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A file that was there for a while, so that its hash is relied on."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return str(path)


@pytest.mark.parametrize("flags", [["--private"], ["--kv-disk", "off"], ["--kv-disk", "0"]])
@pytest.mark.parametrize("where", [[], ["--no-server"]])
def test_what_could_not_be_kept_is_refused_before_anything_is_loaded(
    cli: Cli, opened: Opened, stored: str, flags: list[str], where: list[str]
) -> None:
    told = cli("cache", "warm", stored, "-", *flags, *where, stdin="be kind to all")
    assert (told.code, opened.calls) == (2, [])
    assert flags[0] in told.err
    assert f"hint: localllm serve {stored} first" in told.err


def test_a_file_that_was_just_written_is_waited_for(cli: Cli, opened: Opened, stored: str) -> None:
    os.utime(stored)
    cli("cache", "warm", stored, "-", stdin="be kind to all")
    assert hashes.known(Path(stored)) is not None
    assert len(opened.calls) == 1


def test_a_file_whose_hash_cannot_be_relied_on_is_refused_with_the_reason(
    cli: Cli, opened: Opened, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = time.time() + 86_400
    os.utime(stored, (ahead_s, ahead_s))
    told = cli("cache", "warm", stored, "-", stdin="be kind to all")
    assert (told.code, "lies ahead" in told.err, f"touch {stored}" in told.err) == (3, True, True)
    os.utime(stored, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr(hashes, "_remember", lambda *_: None)
    told = cli("cache", "warm", stored, "-", stdin="be kind to all")
    assert (told.code, "cannot be remembered" in told.err) == (3, True)
    assert opened.calls == []


def _with_disk(monkeypatch: pytest.MonkeyPatch, **disk: int | str) -> None:
    """Let services say this of a disk tier."""
    real = Service.cache_stats
    stats = {"folder": "/kv", "limit_bytes": 1000, "used_bytes": 990, "failure": "", "n_failed": 0, **disk}
    monkeypatch.setattr(Service, "cache_stats", lambda self: replace(real(self), disk=stats))


def test_a_folder_that_is_of_no_use_is_named_before_anything_is_computed(
    cli: Cli, opened: Opened, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_disk(monkeypatch, failure="Permission denied")
    told = cli("cache", "warm", stored, "-", stdin="be kind to all")
    assert (told.code, opened.prompts) == (1, [])
    assert "/kv cannot be used: Permission denied" in told.err


@pytest.mark.parametrize("form", [[], ["--json"], ["--quiet"]])
def test_a_document_of_which_nothing_is_kept_is_a_failure_with_the_reason(
    cli: Cli, opened: Opened, stored: str, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    _with_disk(monkeypatch)
    told = cli("cache", "warm", stored, "-", *form, stdin="be kind to all")
    assert told.code == 1
    assert "error: Nothing of it is kept: there is no room for it in /kv: 990 B of 1.0 kB are used" in told.err
    assert form != ["--json"] or told.json()["is_pinned"] is False


def test_what_the_disk_did_not_take_is_not_called_a_want_of_room(
    cli: Cli, opened: Opened, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_disk(monkeypatch, n_failed=1)
    assert "is kept: /kv did not take it" in cli("cache", "warm", stored, "-", stdin="be kind to all").err


def test_a_server_that_keeps_nothing_says_why(cli: Cli, opened: Opened, file: Path) -> None:
    file.touch()
    service = fake_service(config=RuntimeConfig(tiers=TierConfig(ram_bytes=0)))
    model = {"path": str(file), "config": config_to_wire(LoadConfig())}
    with listening(FileSupervisor(FakeWorker("fake", service, model=model))):
        told = cli("cache", "warm", str(file), "-", stdin="be kind to all")
    assert told.code == 1
    assert "nothing of this model goes to disk" in told.err
    assert "and --kv-ram off" in told.err


def test_what_found_no_room_on_disk_is_told(
    cli: Cli, opened: Opened, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_part = Warmed(100, 100, {}, {"device": 100, "ram": 100, "disk": 64}, is_pinned=True)
    monkeypatch.setattr(Service, "warm", lambda *_: in_part)
    _with_disk(monkeypatch)
    told = cli("cache", "warm", stored, "-", stdin="be kind to all")
    assert told.code == 0
    assert "only its first 64 tokens are kept: there is no room for it in /kv" in told.err


def read(path: Path) -> GenerationRequest:
    return read_request(path, GenerationOptions(), Notes())


def test_a_request_is_read_as_the_server_would(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}')
    request = read(path)
    assert isinstance(request, ChatRequest)
    assert (request.messages[0]["content"], len(request.tools)) == ("hi", 1)
    path.write_text('{"prompt": "once upon"}')
    prompt = read(path)
    assert isinstance(prompt, CompletionRequest)
    assert prompt.prompt == "once upon"
    path.write_text("x-anthropic-billing-header: cch=1;\nBe kind.")
    request = read(path)
    assert isinstance(request, ChatRequest)
    assert request.messages[0]["content"] == "Be kind."


BROKEN = (
    '{"messages": [{"role": "user", "content": "hi"}],}',
    '{"messages": [',
    "{'messages': []}",
    ' {\n "prompt": "x"',
)
FOREIGN = ('{"foo": 1}', "{}", "[1,2]", '[{"role": "user", "content": "hi"}]')


@pytest.mark.parametrize("text", [*BROKEN, *FOREIGN])
@pytest.mark.parametrize("name", ["f.json", "f.txt", "-"])
def test_json_that_is_no_request_is_no_document_either(cli: Cli, tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "f.json").write_text(text)
    (tmp_path / "f.txt").write_text(text)
    file = "-" if name == "-" else str(tmp_path / name)
    for verb in ("explain", "warm"):
        told = cli("cache", verb, "nothing", file, stdin=text)
        assert told.code == 2
        assert told.err.startswith(f"error: {'stdin' if name == '-' else file} ")
        assert ("is JSON with neither" if text in FOREIGN else "is no valid JSON") in told.err
        assert 'hint: put it as {"messages": [' in told.err


def test_a_broken_request_is_told_with_the_place(cli: Cli, tmp_path: Path) -> None:
    told = cli("cache", "explain", "nothing", "-", stdin='{"messages": [],\n}')
    assert "line " in told.err
    assert "column " in told.err


@pytest.mark.parametrize(
    "text", ["Be kind.", "{{ name }} is kind", "{% if x %}", "{ int x; }", "[1] A note", "42", "[x]"]
)
def test_plain_text_stays_plain_text_unless_its_file_says_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.txt"
    path.write_text(text)
    request = read(path)
    assert isinstance(request, ChatRequest)
    assert request.messages[0] == {"role": "system", "content": text}
    with pytest.raises(UsageError, match="JSON"):
        read(path.rename(tmp_path / "f.JSON"))


def test_what_a_body_says_beside_its_prompt_holds(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('{"prompt": [5, 6, 7], "cache_prompt": false}')
    ids = read(path)
    assert isinstance(ids, CompletionRequest)
    assert (ids.prompt, ids.options.reuse_prefix) == ((5, 6, 7), False)
    path.write_text('{"prompt": "def f(", "suffix": "return x", "cache": "off"}')
    hole = read(path)
    assert isinstance(hole, CompletionRequest)
    assert (hole.prompt, hole.suffix, hole.options.cache) == ("def f(", "return x", "off")
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"thinks": true}}')
    request = read(path)
    assert isinstance(request, ChatRequest)
    assert request.template_kwargs == {"thinks": True}


def test_what_has_no_effect_is_told(cli: Cli, local: Local, file: Path) -> None:
    line = "x-anthropic-billing-header: cch=1;"
    asked = {"messages": [{"role": "system", "content": f"{line}\nBe kind."}], "odd": 1}
    for verb in ("explain", "warm"):
        told = cli("cache", verb, str(file), "-", stdin=json.dumps(asked))
        assert "x-anthropic-billing-header is left out" in told.err
        assert "means nothing here: odd" in told.err
        plain = cli("cache", verb, str(file), "-", stdin="x-anthropic-billing-header: is a line of agents")
        assert (plain.code, "left out" in plain.err) == (0, False)


def test_a_request_that_wants_no_cache_is_explained_so_and_not_warmed(
    cli: Cli, opened: Opened, local: Local, file: Path
) -> None:
    asked = json.dumps({"prompt": "Rule one: be kind. " * 4, "cache": "off"})
    assert cli("cache", "explain", str(file), "-", "--json", stdin=asked).json()["reason"] == "off"
    for where in ([], ["--no-server"]):
        told = cli("cache", "warm", str(file), "-", *where, stdin=asked)
        assert (told.code, "wants no cache" in told.err) == (2, True)
    assert local.worker.requests == []


def test_a_private_document_is_pinned_in_the_servers_memory_only(cli: Cli, file: Path, tmp_path: Path) -> None:
    file.touch()
    tiers = TierConfig(ram_bytes=1 << 24, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 24, keeps_all=True)
    service = fake_service(config=RuntimeConfig(tiers=tiers))
    worker = FakeWorker("fake", service, model={"path": str(file), "config": config_to_wire(LoadConfig())})
    document = "Rule one: be kind. Rule two: say what you know. " * 8
    with listening(FileSupervisor(worker)):
        told = cli("cache", "warm", str(file), "-", "--private", stdin=document)
        assert "in the server's memory only" in told.err
        kept = cli("cache", "warm", str(file), "-", "--private", "--json", stdin=document).json()
        assert (kept["is_pinned"], kept["kept_tokens"]["disk"]) == (True, 0)
        assert kept["kept_tokens"]["ram"] == kept["n_tokens"]
    assert not list((tmp_path / "kv").rglob("*.kv"))  # nor when the model was closed


def test_a_server_that_keeps_its_clients_apart_is_not_warmed_from_here(cli: Cli, opened: Opened, file: Path) -> None:
    with listening(supervisor_of(file, config=LoadConfig(parallel=4)), is_cache_shared=False) as local:
        warmed = cli("cache", "warm", str(file), "-", stdin="Rule one: be kind.")
        assert (warmed.code, local.worker.requests) == (2, [])
        assert "--no-shared-cache" in warmed.err
        assert "over HTTP with the key" in warmed.err
        told = cli("cache", "explain", str(file), "-", "--json", stdin="Rule one: be kind.")
        assert told.json()["n_known_tokens"] == 0
        assert "not what its HTTP clients would" in told.err
    assert opened.calls == []


def test_a_server_whose_clients_share_says_nothing_of_that(cli: Cli, local: Local, file: Path) -> None:
    told = cli("cache", "explain", str(file), "-", stdin="Rule one: be kind.")
    assert (told.code, "keeps its clients apart" in told.err) == (0, False)


@pytest.mark.parametrize("verb", ["explain", "warm"])
@pytest.mark.parametrize(
    "flags", [["--ctx", "512"], ["--kv", "q8_0"], ["--gpu", "off"], ["--threads", "3"], ["--deterministic"]]
)
def test_a_server_with_other_settings_is_passed_over_as_by_run_and_that_is_said(
    cli: Cli, opened: Opened, local: Local, file: Path, verb: str, flags: list[str]
) -> None:
    told = cli("cache", verb, str(file), "-", *flags, stdin="Rule one: be kind.")
    name = flags[0].removeprefix("--")
    assert f"not through the server at http://127.0.0.1:8080: The server holds fake with {name}" in told.err
    assert (len(opened.calls), local.worker.requests, local.worker.calls) == (1, [], [])


@pytest.mark.parametrize("verb", ["explain", "warm"])
def test_of_several_servers_the_one_with_the_wished_settings_is_taken(
    cli: Cli, opened: Opened, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with (
        listening(supervisor_of(file, config=LoadConfig(ctx=4096))) as first,
        listening(supervisor_of(file, config=LoadConfig(ctx=2048)), tmp_path / "s.sock") as second,
    ):
        both = registry.running()
        for records in (both, both[::-1]):
            monkeypatch.setattr(registry, "running", lambda found=records: found)
            told = cli("cache", verb, str(file), "-", "--ctx", "2048", stdin="Rule one: be kind.")
            assert told.code == 0
            assert "through the server at" in told.err
        assert (first.worker.requests, first.worker.calls, opened.calls) == ([], [], [])
        assert second.worker.calls


@pytest.mark.parametrize("verb", ["explain", "warm"])
def test_a_prompt_that_the_server_has_no_room_for_is_looked_at_here(
    cli: Cli, opened: Opened, local: Local, file: Path, verb: str
) -> None:
    short = cli("cache", verb, str(file), "-", stdin="x" * 4000)
    assert (short.code, opened.calls) == (0, []), "no room for an answer is needed"
    told = cli("cache", verb, str(file), "-", stdin="x" * 5000)
    assert "its context of 4096 tokens is too short" in told.err
    assert len(opened.calls) == 1


def _interrupting(n_forwards: int) -> Callable[[object], None]:
    seen: list[object] = []

    def on_forward(batch: object) -> None:
        seen.append(batch)
        time.sleep(0.02)
        if len(seen) == n_forwards:
            os.kill(os.getpid(), signal.SIGINT)

    return on_forward


def test_ctrl_c_tells_what_stays_in_the_server(cli: Cli, file: Path) -> None:
    engine = FakeEngine(script=lambda tokens: ord("x"), on_forward=_interrupting(3))
    with listening(supervisor_of(file, engine)):
        told = cli("cache", "warm", str(file), "-", stdin="x" * 3000)
    assert told.code == 130
    assert re.search(r"interrupted; of what was computed stay, .*: \d+ on the device, \d+ in RAM\n", told.err)


def test_ctrl_c_tells_that_nothing_stays_of_what_ends_with_the_command(cli: Cli, opened: Opened, stored: str) -> None:
    opened.on_forward = _interrupting(3)
    told = cli("cache", "warm", stored, "-", stdin="x" * 3000)
    assert told.code == 130
    assert "interrupted; of what was computed stay, until others need the room: nothing\n" in told.err
    opened.on_forward = _interrupting(3)
    assert "interrupted" not in cli("cache", "warm", stored, "-", "--quiet", stdin="x" * 3000).err


def test_places_are_told_in_words(cli: Cli, local: Local, file: Path) -> None:
    assert re.search(
        r"kept: \d+ on the device, \d+ in RAM\n", cli("cache", "warm", str(file), "-", stdin="x" * 300).err
    )
    assert re.search(r"\d+ from the device", cli("cache", "explain", str(file), "-", stdin="x" * 300).out)
