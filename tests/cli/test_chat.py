"""`localllm chat`: turns, commands, files, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.cli import chat_input
from localllm.cli.chat_input import PROMPT, read_message
from localllm.cli.conversation import Conversation, load, save
from localllm.errors import UsageError
from tests.cli.conftest import Opened, Result

Cli = Callable[..., Result]


class Typed:
    """A terminal where these lines are typed; an exception is raised in its turn."""

    is_script = False

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines: Iterator[str | BaseException] = iter(lines)
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str:
        """Give the next line."""
        self.prompts.append(prompt)
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Typed]:
    """Put a terminal in the place of stdin."""

    def put(*lines: str | BaseException) -> Typed:
        terminal = Typed(*lines)
        monkeypatch.setattr(chat_input, "open_lines", lambda: terminal)
        return terminal

    return put


def _echo(prompt: str) -> str:
    """Answer with the number of the turn."""
    return f"answer {prompt.count('<|user|>')}"


def test_piped_lines_are_turns_of_one_conversation(cli: Cli, opened: Opened) -> None:
    opened.answer = _echo
    result = cli("chat", "m", stdin="one\ntwo\n")
    assert result == Result(0, "answer 1\nanswer 2\n", "")
    assert opened.prompts[-1] == "<s><|user|>one<|assistant|>answer 1</s><|user|>two<|assistant|>"


def test_later_turn_takes_the_conversation_from_the_cache(cli: Cli, opened: Opened) -> None:
    result = cli("chat", "m", stdin="one\n/stats\ntwo\n/stats\n")
    first, second = [line for line in result.err.splitlines() if "cached" in line]
    assert "(0 cached)" in first
    assert "(0 cached)" not in second


def test_blocks_and_backslashes_make_longer_messages(cli: Cli, opened: Opened) -> None:
    cli("chat", "m", stdin='a\\\nb\n"""\nc\n\nd\n"""\n"""e"""\n')
    assert opened.prompts[-1].count("<|user|>") == 3
    assert "<|user|>a\nb<|assistant|>" in opened.prompts[-1]
    assert "<|user|>c\n\nd<|assistant|>" in opened.prompts[-1]
    assert "<|user|>e<|assistant|>" in opened.prompts[-1]


def test_open_block_at_the_end_of_a_script_is_refused(cli: Cli, opened: Opened) -> None:
    assert cli("chat", "m", stdin='"""\nnever closed\n').code == 2


def test_script_ends_at_its_first_failure(cli: Cli, opened: Opened) -> None:
    result = cli("chat", "m", stdin="one\n/nonsense\ntwo\n")
    assert (result.code, result.out) == (2, "Hello there.\n")
    assert "/help" in result.err


def test_script_with_binary_is_refused(cli: Cli, opened: Opened) -> None:
    result = cli("chat", "m", stdin=b"one\n\xff\n")
    assert (result.code, result.out) == (2, "Hello there.\n")
    assert "line 2" in result.err


def test_system_message_can_be_set_and_removed(cli: Cli, opened: Opened) -> None:
    cli("chat", "m", "-s", "first", stdin='x\n/system second\ny\n/system ""\nz\n')
    starts = [prompt[: prompt.index("x")] for prompt in opened.prompts]
    assert starts == ["<s><|user|>first<|user|>", "<s><|user|>second<|user|>", "<s><|user|>"]


def test_undo_takes_a_turn_back_and_regen_repeats_it(cli: Cli, opened: Opened) -> None:
    opened.answer = _echo
    result = cli("chat", "m", stdin="one\ntwo\n/undo\nthree\n/regen\n")
    assert result.out == "answer 1\nanswer 2\nanswer 2\nanswer 2\n"
    assert opened.prompts[-1].endswith("<|user|>three<|assistant|>")
    assert "two" not in opened.prompts[-1]


def test_regen_draws_with_another_seed(cli: Cli, opened: Opened) -> None:
    events = cli("chat", "m", "--seed", "4", "--jsonl", stdin="one\n/regen\n/regen\n").jsonl()
    assert [e["seed"] for e in events if e["event"] == "admitted"] == [4, 5, 6]


def test_regen_that_fails_keeps_the_old_answer(
    cli: Cli, opened: Opened, typed: Callable[..., Typed], tmp_path: Path
) -> None:
    opened.fail_forwards = [40]
    opened.answer = lambda prompt: "twenty characters..."
    typed("one", "/regen", f"/save {tmp_path / 'c.json'}")
    assert cli("chat", "m").code == 0
    assert load(tmp_path / "c.json").turns == [("one", "twenty characters...")]


def test_settings_can_be_shown_changed_and_reset(cli: Cli, opened: Opened) -> None:
    script = "/set max_tokens 5\none\n/set max-tokens default\n/set\ntwo\n"
    result = cli("chat", "m", stdin=script)
    assert result.out == "Hello\nHello there.\n"
    assert "max_tokens = default" in result.err


@pytest.mark.parametrize(
    "command",
    [
        "/set ctx 5",
        "/set max_tokens 0",
        "/set top_k x",
        "/set temperature -1",
        "/set seed -1",
        "/set temperature",
        "/set seed 18446744073709551616",
        "/undo",
        "/regen",
        "/stats",
        "/save",
        "/save ~nobody-here/c.json",
        "/save a\0b",
        "/save /",
        f"/save {'x' * 300}",
        "/load",
        "/load a\0b",
        "/load ~nobody-here/c.json",
        "/load /dev/zero",
        "/clear all",
        "/undo 2",
        "/tokens please",
        "/load /no/such/file",
        "/what",
    ],
)
def test_bad_commands_are_told_and_the_talk_goes_on(
    cli: Cli, opened: Opened, typed: Callable[..., Typed], command: str
) -> None:
    typed(command, "hi")
    result = cli("chat", "m")
    assert (result.code, result.out) == (0, "Hello there.\n")
    assert "error: " in result.err
    assert "hint: " in result.err


def test_unexpected_failure_does_not_end_the_talk(cli: Cli, opened: Opened, typed: Callable[..., Typed]) -> None:
    typed("one", ZeroDivisionError("secret"), "two")
    result = cli("chat", "m")
    assert (result.code, result.out) == (0, "Hello there.\n" * 2)
    assert "ZeroDivisionError" in result.err
    assert "secret" not in result.err


def test_model_without_a_template_is_refused_before_the_first_question(
    cli: Cli, opened: Opened, typed: Callable[..., Typed]
) -> None:
    opened.template = None
    typed("never asked")
    result = cli("chat", "m")
    assert (result.code, result.out) == (2, "")
    assert "--template" in result.err


def test_load_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file"):
        load(tmp_path / "pipe")


def test_clear_forgets_the_turns(cli: Cli, opened: Opened) -> None:
    cli("chat", "m", "-s", "sys", stdin="one\n/clear\ntwo\n")
    assert opened.prompts[-1] == "<s><|user|>sys<|user|>two<|assistant|>"


def test_tokens_are_counted_against_the_context(cli: Cli, opened: Opened) -> None:
    result = cli("chat", "m", stdin="/tokens\none\n/tokens\n")
    assert result.err.splitlines()[0] == "0 of 4096 tokens"
    assert int(result.err.splitlines()[1].split()[0]) > len("oneHello there.")


def test_help_names_every_command(cli: Cli, opened: Opened) -> None:
    from localllm.cli.chat_commands import COMMANDS

    told = cli("chat", "m", stdin="/help\n")
    assert told.out == ""
    assert all(command in told.err for command in COMMANDS)


def test_text_that_begins_with_a_slash_needs_a_space(cli: Cli, opened: Opened) -> None:
    assert cli("chat", "m", stdin=" /etc/hosts is what?\n").code == 0
    assert "/etc/hosts" in opened.prompts[0]


def test_files_go_with_the_first_question(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("notes\n")
    cli("chat", "m", "-f", str(tmp_path / "a.txt"), stdin="one\ntwo\n")
    assert "<|user|>one\n\nnotes<|assistant|>" in opened.prompts[-1]
    assert opened.prompts[-1].count("notes") == 1


@pytest.mark.parametrize("flag", [["--raw"], ["--json"], ["-f", "-"]])
def test_flags_that_have_no_place_in_a_chat_are_refused(cli: Cli, opened: Opened, flag: list[str]) -> None:
    assert cli("chat", "m", *flag, stdin="hi\n").code == 2
    assert opened.calls == []


def test_failed_turn_leaves_the_conversation_as_it_was(cli: Cli, opened: Opened, typed: Callable[..., Typed]) -> None:
    typed("one", "word " * 1000, "two")
    result = cli("chat", "m")
    assert result.code == 0
    assert "error: " in result.err
    assert "word word" not in opened.prompts[-1]
    assert opened.prompts[-1].endswith("</s><|user|>two<|assistant|>")


def test_interrupted_answer_is_kept_and_the_talk_goes_on(cli: Cli, opened: Opened, typed: Callable[..., Typed]) -> None:
    opened.answer = lambda prompt: "word " * 100 if "two" not in prompt else "fine"
    n_forwards: list[object] = []

    def interrupt(batch: object) -> None:
        n_forwards.append(batch)
        if len(n_forwards) == 12:
            os.kill(os.getpid(), signal.SIGINT)

    opened.on_forward = interrupt
    typed("one", "two")
    result = cli("chat", "m")
    assert result.code == 0
    assert result.out.endswith("\nfine\n")
    assert "<|assistant|>word " in opened.prompts[-1]
    assert len(result.out) < 300


def test_second_interrupt_at_the_prompt_leaves(cli: Cli, opened: Opened, typed: Callable[..., Typed]) -> None:
    typed(KeyboardInterrupt(), KeyboardInterrupt(), "never asked")
    result = cli("chat", "m")
    assert (result.code, result.out) == (130, "")


def test_interrupt_at_the_prompt_is_dealt_with_and_the_next_is_a_first_one(
    cli: Cli, opened: Opened, typed: Callable[..., Typed], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = typed("one", "two")
    interrupting = iter((True, False, True, False))

    def read(prompt: str) -> str:
        if next(interrupting, False):
            signal.raise_signal(signal.SIGINT)
        return Typed.read(terminal, prompt)

    monkeypatch.setattr(terminal, "read", read)
    result = cli("chat", "m")
    assert (result.code, result.out) == (0, "Hello there.\n" * 2)


def test_interrupt_is_forgotten_after_the_next_line(cli: Cli, opened: Opened, typed: Callable[..., Typed]) -> None:
    typed(KeyboardInterrupt(), "one", KeyboardInterrupt(), "two")
    assert cli("chat", "m").out == "Hello there.\n" * 2


def test_timeout_holds_for_each_answer(cli: Cli, opened: Opened) -> None:
    import time

    opened.answer = lambda prompt: "word " * 400
    opened.on_forward = lambda batch: time.sleep(0.02)
    result = cli("chat", "m", "--timeout", "0.5", stdin="one\n")
    assert result.code == 124
    assert result.out.startswith("word")


def test_more_lines_are_asked_for_with_another_prompt() -> None:
    lines = Typed("a\\", "b")
    assert read_message(lines) == "a\nb"
    assert lines.prompts == [PROMPT, "... "]


def test_saved_conversation_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    talk = Conversation("sys", [("a", "b\n"), ("é", "\U0001f600")])
    save(talk, path, "m", None)
    assert load(path) == talk
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    save(Conversation(), path, "m", None)
    assert load(path) == Conversation()
    assert os.listdir(tmp_path) == ["c.json"]


def test_save_and_load_work_in_a_chat(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    cli("chat", "m", stdin=f"one\n/save {path}\n")
    cli("chat", "m", stdin=f"/load {path}\ntwo\n")
    assert opened.prompts[-1] == "<s><|user|>one<|assistant|>Hello there.</s><|user|>two<|assistant|>"


def test_save_does_not_overwrite_something_else(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(UsageError):
        save(Conversation(), path, "m", None)
    assert path.read_text() == "data"


GOOD = {"v": 1, "system": None, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b"[" * 100_000,
        json.dumps([]),
        json.dumps({**GOOD, "v": 2}),
        json.dumps({**GOOD, "system": 5}),
        json.dumps({**GOOD, "messages": None}),
        json.dumps({**GOOD, "messages": GOOD["messages"][:1]}),  # type: ignore[index]
        json.dumps({**GOOD, "messages": GOOD["messages"][::-1]}),  # type: ignore[index]
        json.dumps({**GOOD, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}),
    ],
)
def test_file_that_is_no_conversation_is_refused(tmp_path: Path, body: str | bytes) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    with pytest.raises(UsageError, match=r"c\.json"):
        load(path)
