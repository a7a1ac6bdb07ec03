"""`localllm run`: prompt, answer, forms of output, and every way it can end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.cli import signals
from localllm.cli.prompt_input import argument_text
from localllm.errors import ContextOverflow, ModelNotFound, NotEnoughMemory
from localllm.models.catalog import DEFAULT_ALIAS
from tests.cli.conftest import Opened, Result

Cli = Callable[..., Result]


def test_answer_alone_is_on_stdout(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "hi")
    assert result == Result(0, "Hello there.\n", "")
    assert opened.calls[0][0] == "m"


def test_newline_is_not_doubled(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: "line\n"
    assert cli("run", "m", "hi").out == "line\n"


def test_empty_answer_is_an_empty_line(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: ""
    assert cli("run", "m", "hi") == Result(0, "\n", "")


def test_prompt_files_and_stdin_are_joined_in_this_order(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a file\n")
    cli("run", "m", "asked", "-f", str(tmp_path / "a.txt"), stdin="piped\n")
    assert opened.prompts == ["<s><|user|>asked\n\nfrom a file\n\npiped<|assistant|>"]


def test_dash_places_stdin_among_the_files(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    cli("run", "m", "asked", "-f", "-", "-f", str(tmp_path / "a.txt"), stdin="piped")
    assert opened.prompts == ["<s><|user|>asked\n\npiped\n\nA<|assistant|>"]


def test_system_message_comes_first(cli: Cli, opened: Opened) -> None:
    cli("run", "m", "hi", "-s", "be brief")
    assert opened.prompts == ["<s><|user|>be brief<|user|>hi<|assistant|>"]


@pytest.mark.parametrize(
    ("argv", "stdin"), [(["what is this?"], None), ([], "what is this?"), (["what is this?"], "more")]
)
def test_prompt_without_a_model_goes_to_the_default_and_says_so(
    cli: Cli, opened: Opened, argv: list[str], stdin: str | None
) -> None:
    result = cli("run", *argv, stdin=stdin)
    assert result.code == 0
    assert result.out == "Hello there.\n"
    assert opened.calls[0][0] == DEFAULT_ALIAS
    assert DEFAULT_ALIAS in result.err


def test_default_names_better_models_that_fit(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.models import available

    monkeypatch.setattr(available, "total_bytes", lambda: 64 << 30)
    monkeypatch.setattr(available, "available_bytes", lambda: 1 << 30)  # what is free at the moment says little
    assert "localllm pull" in cli("run", "two words").err
    assert cli("run", "two words", "-q").err == ""


def test_name_with_spaces_of_a_file_that_exists_is_a_model(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    path.touch()
    cli("run", str(path), stdin="hi")
    assert opened.calls[0][0] == str(path)


@pytest.mark.parametrize("argv", [[], ["m"], [""], ["", "hi"], ["m", ""], ["m", "  "]])
def test_nothing_asked_is_a_usage_error(cli: Cli, opened: Opened, argv: list[str]) -> None:
    result = cli("run", *argv)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "hint: localllm run" in result.err
    assert opened.calls == []


@pytest.mark.parametrize("data", [b"\xff\xfe\x00h", b"ok\x80", b"\x7fELF\x00\x00"])
def test_stdin_that_is_not_text_is_refused_before_loading(cli: Cli, opened: Opened, data: bytes) -> None:
    result = cli("run", "m", "hi", stdin=data)
    assert result.code == 2
    assert "stdin" in result.err
    assert "Traceback" not in result.err
    assert opened.calls == []


def test_byte_order_mark_is_dropped(cli: Cli, opened: Opened) -> None:
    cli("run", "m", stdin=b"\xef\xbb\xbfhi")
    assert opened.prompts == ["<s><|user|>hi<|assistant|>"]


def test_unreadable_file_is_named(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    result = cli("run", "m", "hi", "-f", str(tmp_path / "none"))
    assert (result.code, "none" in result.err) == (2, True)


def test_raw_prompt_is_sent_as_it_is(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "--raw", "-n", "3", stdin="Once upon a time\n")
    assert result.out == "xxx\n"
    assert opened.calls[0][2].prompt == "Once upon a time\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--raw", "-s", "x"],
        ["--raw", "--template", __file__],
        ["--json", "--jsonl"],
        ["--jsonl", "-x"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["-n", "0"],
        ["-t", "-1"],
        ["--top-p", "2"],
        ["--seed", "-1"],
        ["--seed", "18446744073709551616"],
        ["--threads", "99999999"],
        ["--stop", "caf\udce9"],
        [word for place in range(17) for word in ("--stop", str(place))],
        ["-s", "caf\udce9"],
        ["--repeat-penalty", "1e-300"],
        ["--stop", ""],
        ["--ctx", "many"],
        ["--ctx", "0"],
        ["--gpu", "some"],
        ["--threads", "0"],
        ["--kv", "q3"],
        ["--kv", "q8_0", "--flash-attn", "off"],
        ["--flash-attn", "maybe"],
        ["--template", "/no/such/file"],
        ["--frobnicate"],
        ["one", "too", "many"],
    ],
)
def test_flags_that_make_no_sense_are_refused_before_loading(cli: Cli, opened: Opened, flags: list[str]) -> None:
    result = cli("run", "m", "hi", *flags)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert opened.calls == []


def test_load_flags_reach_the_loader(cli: Cli, opened: Opened) -> None:
    cli("run", "m", "hi", "--ctx", "512", "--kv", "q8_0:f16", "--gpu", "7", "--threads", "3", "--flash-attn", "on")
    config = opened.calls[0][1]
    assert (config.ctx, str(config.kv), config.gpu, config.threads, config.flash_attn) == (512, "q8_0:f16", 7, 3, "on")


def test_context_is_sized_for_the_request(cli: Cli, opened: Opened) -> None:
    cli("run", "m", "hi", "-n", "7", "--seed", "5", "--stop", "a b", "--stop", "c", "--top-k", "4")
    options = opened.calls[0][2].options
    assert (options.max_tokens, options.seed, options.stop) == (7, 5, ("a b", "c"))
    assert dict(options.sampling) == {"top_k": 4}


def test_default_answer_is_2048_tokens_at_most(cli: Cli, opened: Opened) -> None:
    cli("run", "m", "hi")
    assert opened.calls[0][2].options.max_tokens == 2048


def test_json_is_one_document(cli: Cli, opened: Opened) -> None:
    document = cli("run", "m", "hi", "--json", "--seed", "3").json()
    assert document["text"] == "Hello there."
    assert document["finish_reason"] == "stop"
    assert document["seed"] == 3
    assert document["model"]["sha256"] == "f" * 64
    assert document["model"]["quant"] == "F32"
    assert document["usage"]["completion_tokens"] >= len("Hello there.")
    assert "prefill" in document["timings_ms"]


def test_json_tells_of_a_deterministic_model(cli: Cli, opened: Opened) -> None:
    assert "localllm" not in cli("run", "m", "hi", "--json").json()
    opened.spec = replace(opened.spec, cut_tokens=64, mixes_prefill_and_decode=False)
    assert cli("run", "m", "hi", "--json", "--deterministic").json()["localllm"] == {"deterministic": True}
    assert opened.calls[-1][1].deterministic


def test_jsonl_is_the_events(cli: Cli, opened: Opened) -> None:
    events = cli("run", "m", "hi", "--jsonl").jsonl()
    kinds = [event["event"] for event in events]
    assert kinds[-2:] == ["usage", "done"]
    assert "".join(e["text"] for e in events if e["event"] == "token") == "Hello there."
    assert all(event["v"] == 1 for event in events)


def test_stats_are_on_stderr_even_when_quiet(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "hi", "--stats", "-q", "--seed", "3")
    assert result.out == "Hello there.\n"
    assert "seed 3" in result.err


def test_length_is_told_and_strict_length_fails(cli: Cli, opened: Opened) -> None:
    plain = cli("run", "m", "hi", "-n", "5")
    strict = cli("run", "m", "hi", "-n", "5", "--strict-length")
    assert (plain.code, plain.out, strict.code, strict.out) == (0, "Hello\n", 9, "Hello\n")
    assert "5 tokens" in plain.err
    assert strict.err.startswith("error: ")


def test_strict_length_leaves_the_json_document_whole(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "hi", "-n", "5", "--strict-length", "--json")
    assert result.code == 9
    assert result.json()["finish_reason"] == "length"


def test_clipped_length_is_told(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "hi", "-n", "9999")
    assert result.code == 0
    assert "9999" in result.err
    assert cli("run", "m", "hi").err == ""


def test_extract_gives_the_first_block_and_stops_there(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: "Here:\n```python\nprint(1)\n```\nand more " + "blah " * 50
    opened.on_forward = lambda batch: time.sleep(0.002)  # a model's steps take longer than ending it does
    result = cli("run", "m", "hi", "-x")
    assert result == Result(0, "print(1)\n", "")
    document = cli("run", "m", "hi", "-x", "--json").json()
    assert (document["text"], document["finish_reason"]) == ("print(1)\n", "stop")
    assert document["usage"]["completion_tokens"] < 100


def test_extract_without_a_block_fails_and_writes_nothing(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "hi", "-x")
    assert (result.code, result.out) == (1, "")
    assert "code block" in result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("There is no model m.", "localllm pull m"), 3),
        (NotEnoughMemory("Not enough memory.", "localllm ls", total_bytes=5), 4),
        (ContextOverflow("Too long.", n_prompt_tokens=9), 5),
    ],
)
def test_load_failures_have_their_exit_code_and_document(cli: Cli, opened: Opened, error: Exception, code: int) -> None:
    def fail() -> None:
        raise error

    opened.on_open = fail
    plain, document = cli("run", "m", "hi"), cli("run", "m", "hi", "--json")
    assert (plain.code, plain.out) == (code, "")
    assert plain.err.startswith(f"error: {error}")
    assert document.code == code
    assert document.json()["error"]["message"] == str(error)
    assert cli("run", "m", "hi", "--jsonl").jsonl()[-1]["event"] == "error"


def test_context_overflow_is_exit_5(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "word " * 2000)
    assert result.code == 5
    assert "4096" in result.err


def test_unexpected_failure_is_a_sentence_without_the_prompt(cli: Cli, opened: Opened) -> None:
    def fail() -> None:
        raise KeyError("secret prompt")

    opened.on_open = fail
    result = cli("run", "m", "hi")
    assert result.code == 1
    assert "KeyError" in result.err
    assert "secret prompt" not in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("run", "m", "hi", "-v").err


def test_engine_failure_keeps_what_was_written(cli: Cli, opened: Opened) -> None:
    opened.fail_forwards = [4]
    result = cli("run", "m", "hi")
    assert result.code == 1
    assert result.out.startswith("H")
    assert result.err.startswith("error: ")
    assert cli("run", "m", "hi", "--jsonl").jsonl()[-1]["event"] == "error"


def _signal_at(n_rows: int, number: int) -> Callable[[object], None]:
    """Return a hook that sends a signal at the n-th forward."""
    count = [0]

    def hook(batch: object) -> None:
        count[0] += 1
        if count[0] == n_rows:
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    return hook


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_the_answer_keeps_what_there_is(cli: Cli, opened: Opened, number: int, code: int) -> None:
    opened.answer = lambda prompt: "word " * 200
    opened.on_forward = _signal_at(12, number)
    result = cli("run", "m", "hi")
    assert result.code == code
    assert result.out.startswith("word ")
    assert result.out.endswith("\n")
    assert len(result.out) < 500
    assert result.err == ""


def test_interrupted_json_is_still_a_document(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: "word " * 200
    opened.on_forward = _signal_at(12, signal.SIGINT)
    result = cli("run", "m", "hi", "--json")
    assert result.code == 130
    document = result.json()
    assert document["finish_reason"] == "cancelled"
    assert document["text"].startswith("word ")


def test_interrupted_jsonl_ends_with_done(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: "word " * 200
    opened.on_forward = _signal_at(12, signal.SIGINT)
    result = cli("run", "m", "hi", "--jsonl")
    assert result.code == 130
    assert [e["event"] for e in result.jsonl()][-1] == "done"
    assert any(e.get("reason") == "cancelled" for e in result.jsonl())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_during_the_load_leaves_at_once(cli: Cli, opened: Opened, number: int, code: int) -> None:
    loading = threading.Event()

    def load() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        loading.wait(20)

    opened.on_open = load
    started_s = time.monotonic()
    try:
        result = cli("run", "m", "hi")
    finally:
        loading.set()
    assert (result.code, result.out, result.err) == (code, "", "")
    assert time.monotonic() - started_s < 10


def test_second_signal_leaves_and_is_never_mistaken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(signals, "leave", left.append)

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:  # what cleans up, such as a lock's release in the standard library
            with suppress(signals.Stopped):
                signal.raise_signal(signal.SIGINT)

    with signals.Interrupts(), pytest.raises(signals.Stopped):
        work()
    assert left == [130]


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800"])
def test_prompt_that_is_no_utf8_is_refused_before_loading(cli: Cli, opened: Opened, text: str) -> None:
    result = cli("run", "m", text)
    assert (result.code, result.out, opened.calls) == (2, "", [])
    assert "UTF-8" in result.err


def test_utf8_argument_of_an_ascii_locale_is_what_was_typed() -> None:
    assert argument_text("Gr\udcc3\udcb6\udcc3\udc9fe", "x") == "Größe"


@pytest.mark.parametrize("flags", [[], ["--json"], ["--jsonl"]])
def test_timeout_covers_the_load(cli: Cli, opened: Opened, flags: list[str]) -> None:
    loading = threading.Event()
    opened.on_open = lambda: loading.wait(20) and None
    try:
        result = cli("run", "m", "hi", "--timeout", "0.1", *flags)
    finally:
        loading.set()
    assert result.code == 124
    assert "time limit" in result.err
    assert not flags or "time limit" in str(result.jsonl()[-1])


def test_timeout_during_the_answer_keeps_what_there_is(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: "word " * 400
    opened.on_forward = lambda batch: time.sleep(0.02)
    result = cli("run", "m", "hi", "--timeout", "0.6")
    assert result.code == 124
    assert result.out.startswith("word")
    assert "time limit" in result.err


def test_handlers_and_timer_are_put_back(cli: Cli, opened: Opened) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    cli("run", "m", "hi", "--timeout", "60")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_closed_reader_ends_the_work_quietly(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.answer = lambda prompt: "word " * 400
    read_end, write_end = os.pipe()
    os.close(read_end)
    n_forwards: list[object] = []
    opened.on_forward = n_forwards.append
    with os.fdopen(write_end, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        result = cli("run", "m", "hi")
    assert (result.code, result.err) == (141, "")
    assert len(n_forwards) < 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_a_sentence(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = cli("run", "m", "hi")
    assert result.code == 1
    assert result.err.startswith("error: Cannot write to stdout: No space left on device.")


def test_service_is_closed_in_the_end(cli: Cli, opened: Opened) -> None:
    cli("run", "m", "hi")
    assert not opened.services[0].is_alive


def test_verbose_tells_the_load(cli: Cli, opened: Opened) -> None:
    assert "context of 4096 tokens" in cli("run", "m", "hi", "-v").err


def test_a_lone_word_that_is_no_model_is_offered_as_the_prompt(cli: Cli, opened: Opened) -> None:
    result = cli("run", "hello", stdin="")
    assert result.code == 2
    assert "names none that is here" in result.err
    assert result.err.endswith(f"hint: localllm run {DEFAULT_ALIAS} hello\n")
    assert opened.calls == []


def test_a_model_without_a_prompt_is_kept_in_the_hint(cli: Cli, opened: Opened, tiny: Path) -> None:
    path = tiny / "llama-dense.gguf"
    result = cli("run", str(path), stdin="")
    assert result.err == f"error: There is no prompt.\nhint: localllm run {path} 'your question'\n"


@pytest.mark.parametrize("kv", ["f16", "q4_0", "q8_0:f16"])
def test_equal_answers_with_another_kv_type_are_refused_before_the_load(cli: Cli, opened: Opened, kv: str) -> None:
    told = cli("run", "m", "hi", "--deterministic", "--kv", kv)
    assert told.code == 2
    assert "needs a KV cache of type q8_0" in told.err
    assert opened.calls == []
    assert cli("run", "m", "hi", "--deterministic", "--kv", "q8_0").code == 0
