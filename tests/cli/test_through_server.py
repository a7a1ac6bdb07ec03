"""`run` and `chat` where a server of this user holds the model, and where it does not quite."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from localllm.cli import main
from localllm.cli.app import build_app
from localllm.runtime.config import LoadConfig
from localllm.worker import client, registry
from localllm.worker.lifecycle import ModelState
from localllm.worker.local_peer import Peer, _draining
from tests.cli.conftest import Opened, Result
from tests.fake_engine import ASSISTANT, EOS, FakeEngine
from tests.worker.local import Local, listening, supervisor_of

Cli = Callable[..., Result]
SAID = b"From the server."


def scripted(tokens: object) -> int:
    """Answer SAID, whatever is asked."""
    held = list(tokens)  # type: ignore[call-overload]
    place = len(held) - 1 - max((i for i, token in enumerate(held) if token == ASSISTANT), default=len(held) - 1)
    return SAID[place] if place < len(SAID) else EOS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def local(file: Path) -> Iterator[Local]:
    with listening(supervisor_of(file, FakeEngine(script=scripted))) as local:
        yield local


def test_run_goes_through_the_server_and_stats_say_so(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    assert cli("run", str(file), "hi") == Result(0, "From the server.\n", "")
    told = cli("run", str(file), "hi", "--stats")
    assert (told.out, opened.calls) == ("From the server.\n", [])
    assert "through the server at http://127.0.0.1:8080" in told.err
    assert "answer 17 tokens" in told.err


def test_json_is_the_same_document(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    there = cli("run", str(file), "hi", "--json").json()
    opened.answer = lambda prompt: SAID.decode()
    here = cli("run", str(file), "hi", "--json", "--no-server").json()
    assert there.keys() == here.keys()
    assert there["model"].keys() == here["model"].keys()
    assert (there["text"], there["finish_reason"]) == (here["text"], here["finish_reason"])
    assert there["usage"].keys() == here["usage"].keys()


def test_jsonl_is_the_same_events(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    there = [event["event"] for event in cli("run", str(file), "hi", "--jsonl").jsonl()]
    opened.answer = lambda prompt: SAID.decode()
    here = [event["event"] for event in cli("run", str(file), "hi", "--jsonl", "--no-server").jsonl()]
    assert (there[0], there[-2:]) == (here[0], here[-2:])
    assert set(there) == set(here)


def test_chat_goes_through_the_server(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    result = cli("chat", str(file), stdin="hello\n/tokens\nagain\n")
    assert (result.code, result.out, opened.calls) == (0, "From the server.\nFrom the server.\n", [])
    assert "of 4096 tokens" in result.err


def test_no_server_loads_here(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    assert cli("run", str(file), "hi", "--no-server").out == "Hello there.\n"
    assert cli("chat", str(file), "--no-server", stdin="hi\n").out == "Hello there.\n"
    assert len(opened.calls) == 2
    assert local.worker.requests == []


@pytest.mark.parametrize("argv", [["--ctx", "512"], ["--kv", "q8_0"], ["--gpu", "off"], ["--threads", "3"]])
def test_other_load_settings_load_here_and_stats_say_why(
    cli: Cli, opened: Opened, local: Local, file: Path, argv: list[str]
) -> None:
    result = cli("run", str(file), "hi", "--stats", *argv)
    assert (result.out, len(opened.calls)) == ("Hello there.\n", 1)
    assert f"not through the server at http://127.0.0.1:8080: The server holds fake with {argv[0][2:]}" in result.err
    assert "server" not in cli("run", str(file), "hi", *argv).err


def test_a_prompt_that_needs_a_longer_context_loads_here(cli: Cli, opened: Opened, local: Local, file: Path) -> None:
    result = cli("run", str(file), "-n", "4000", "--stats", stdin="long " * 100)
    assert len(opened.calls) == 1
    assert "its context of 4096 tokens is too short" in result.err
    assert local.worker.requests == []


def test_a_stated_context_is_the_servers_limit_too(cli: Cli, opened: Opened, file: Path) -> None:
    config = LoadConfig(ctx=4096)
    with listening(supervisor_of(file, FakeEngine(script=scripted), config=config)):
        result = cli("run", str(file), "hi", "-n", "4090", "--ctx", "4096")
    assert (result.out, opened.calls) == ("From the server.\n", [])


def test_another_model_or_one_that_is_not_ready_loads_here(
    cli: Cli, opened: Opened, local: Local, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.gguf").touch()
    cli("run", str(tmp_path / "other.gguf"), "hi")
    local.call(local.server.supervisor.set_state, "fake", ModelState.LOADING)  # type: ignore[attr-defined]
    cli("run", str(file), "hi")
    assert len(opened.calls) == 2


def test_another_version_loads_here(
    cli: Cli, opened: Opened, local: Local, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = replace(local.record, version="0.0.1")
    monkeypatch.setattr(registry, "running", lambda: [old])
    result = cli("run", str(file), "hi", "--stats")
    assert (len(opened.calls), "it is localllm 0.0.1" in result.err) == (1, True)


def test_a_server_that_does_not_answer_costs_a_moment_and_no_more(
    cli: Cli, opened: Opened, local: Local, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setattr(client, "ATTACH_TIMEOUT_S", 0.1)
    go = threading.Event()
    local.loop.call_soon_threadsafe(go.wait, 20)
    try:
        result = cli("run", str(file), "hi", "--stats")
    finally:
        go.set()
    assert (result.out, "does not answer" in result.err) == ("Hello there.\n", True)


def test_a_refusal_of_the_server_is_told_as_here(cli: Cli, opened: Opened, file: Path) -> None:
    config = LoadConfig(ctx=4096)
    with listening(supervisor_of(file, FakeEngine(script=scripted), config=config)):
        result = cli("run", str(file), "--ctx", "4096", stdin="x" * 5000)
    assert (result.code, result.out) == (5, "")
    assert "The prompt has" in result.err


@pytest.mark.parametrize(
    ("verb", "arguments", "stdin"),
    [
        ("run", ["hi"], None),
        ("chat", [], "hi"),
        ("cache warm", ["-"], "x" * 2000),
    ],
)
def test_a_server_that_dies_meanwhile_is_an_error_with_a_hint_that_names_the_verb(
    cli: Cli, opened: Opened, file: Path, verb: str, arguments: list[str], stdin: str | None
) -> None:
    def die(batch: object) -> None:
        local.loop.call_soon_threadsafe(lambda: [p._writer.transport.abort() for p in local.server._peers])
        time.sleep(0.05)

    engine = FakeEngine(script=lambda tokens: ord("x"), on_forward=die)
    with listening(supervisor_of(file, engine)) as local:
        result = cli(*verb.split(), str(file), *arguments, stdin=stdin)
    assert result.code == 6
    assert "is gone" in result.err
    assert f"hint: localllm {verb} --no-server loads the model here" in result.err


@pytest.mark.parametrize("verb", ["run", "cache warm"])
def test_a_server_that_stops_meanwhile_is_an_error_with_a_hint_that_names_the_verb(
    cli: Cli, opened: Opened, local: Local, file: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async def stops(*_: object) -> None:
        raise _draining()

    monkeypatch.setattr(Peer, "_submit", stops)
    result = cli(*verb.split(), str(file), *([] if verb == "run" else ["-"]), stdin="hello")
    assert "is stopping" in result.err
    assert f"hint: localllm {verb} --no-server loads the model here" in result.err


def test_a_worker_that_dies_meanwhile_is_an_error(cli: Cli, opened: Opened, file: Path) -> None:
    def die(batch: object) -> None:
        local.loop.call_soon_threadsafe(local.worker.die)
        time.sleep(0.02)

    with listening(supervisor_of(file, FakeEngine(script=lambda tokens: ord("x"), on_forward=die))) as local:
        result = cli("run", str(file), "hi", "--json")
    assert result.code == 1
    assert result.json()["error"]["code"] == "worker_died"


def test_ctrl_c_keeps_what_there_is_and_ends_the_work_there(cli: Cli, opened: Opened, file: Path) -> None:
    def interrupt(batch: object) -> None:
        n_forwards.append(1)
        time.sleep(0.005)
        if len(n_forwards) == 10:
            os.kill(os.getpid(), signal.SIGINT)

    n_forwards: list[int] = []
    with listening(supervisor_of(file, FakeEngine(script=lambda tokens: ord("x"), on_forward=interrupt))) as local:
        result = cli("run", str(file), "hi", "--json")
        (stream,) = local.worker.streams
        assert stream.n_cancels > 0
    assert (result.code, result.json()["finish_reason"]) == (130, "cancelled")
    assert set(result.json()["text"]) == {"x"}
    assert len(n_forwards) < 100


def test_a_time_limit_holds_through_the_server(cli: Cli, opened: Opened, file: Path) -> None:
    engine = FakeEngine(script=lambda tokens: ord("x"), on_forward=lambda batch: time.sleep(0.01))
    with listening(supervisor_of(file, engine)):
        result = cli("run", str(file), "hi", "--timeout", "0.3")
    assert result.code == 124
    assert result.out.startswith("x")


def test_no_server_is_looked_for_without_a_record(cli: Cli, opened: Opened, file: Path) -> None:
    file.touch()
    result = cli("run", str(file), "hi", "--stats")
    assert (result.out, "server" in result.err) == ("Hello there.\n", False)


THROUGH_A_SERVER: dict[tuple[str, ...], tuple[list[str], str | None]] = {
    ("run",): (["hi"], None),
    ("chat",): ([], "hello\n/tokens\n"),
    ("cache", "explain"): (["-"], "be kind to all"),
    ("cache", "warm"): (["-"], "be kind to all"),
}
"""The verbs whose request may go to a server: what is given after the model, and on stdin."""


def _verbs(tree: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, verb in tree.commands.items():
        yield from _verbs(verb, *path, name) if hasattr(verb, "commands") else [((*path, name), verb)]


def test_each_verb_whose_request_may_go_to_a_server_is_known_here() -> None:
    tree = get_command(build_app(main.VERBS, main.GROUPS))
    found = {path for path, verb in _verbs(tree) if any("--no-server" in p.opts for p in verb.params)}
    assert found == THROUGH_A_SERVER.keys()


@pytest.mark.parametrize("verb", THROUGH_A_SERVER, ids=" ".join)
@pytest.mark.parametrize("wish", ["--private", "LOCALLLM_PRIVATE", "--kv-disk off", ""])
def test_what_is_to_be_kept_off_the_disk_is_so_in_the_server_too(
    cli: Cli,
    opened: Opened,
    local: Local,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: tuple[str, ...],
    wish: str,
) -> None:
    arguments, stdin = THROUGH_A_SERVER[verb]
    if wish.startswith("LOCALLLM"):
        monkeypatch.setenv(wish, "1")
    flags = wish.split() if wish.startswith("-") else []
    assert cli(*verb, str(file), *arguments, *flags, stdin=stdin).code == 0
    private = [request.options.is_private for request in local.worker.requests]
    private += [argument["request"]["options"]["is_private"] for _, argument in local.worker.calls if argument]
    assert set(private) == {bool(wish)}
    assert opened.calls == []
