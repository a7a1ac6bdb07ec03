"""The command as a process: help, version, completion, exit codes, and what a start imports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm import __version__
from localllm.cli import main
from tests.cli.conftest import Result

Cli = Callable[..., Result]
COMMAND = [sys.executable, "-m", "localllm"]
HEAVY = ("numpy", "jinja2", "httpx", "httpx2", "huggingface_hub", "llama_cpp", "rich", "msgspec", "pydantic", "asyncio")


def _run(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, check=False, timeout=60, **more)  # type: ignore[call-overload,no-any-return]


def test_help_lists_every_verb(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    assert all(f"  {verb} " in result.out for verb in (*main.VERBS, *main.GROUPS))


@pytest.mark.parametrize("verb", [*main.VERBS, *main.GROUPS])
def test_each_verb_has_help(cli: Cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: localllm {verb}")


@pytest.mark.parametrize("verb", [[], ["run"], ["bench"], ["bench", "engine"], ["config", "show"]])
def test_short_help_is_help(cli: Cli, verb: list[str]) -> None:
    assert cli(*verb, "-h") == cli(*verb, "--help")


def test_no_help_shows_the_inner_name_of_a_type_or_cuts_a_sentence(cli: Cli) -> None:
    for verb in ([], *([verb] for verb in main.VERBS), ["bench"], ["bench", "engine"], ["config"], ["config", "show"]):
        text = cli(*verb, "--help").out
        assert not re.search(r"<\w[\w ]*>|\w\.\.\.$", text, re.MULTILINE), text


def test_version(cli: Cli) -> None:
    assert cli("--version") == Result(0, f"localllm {__version__}\n", "")


@pytest.mark.parametrize("argv", [[], ["config"]])
def test_missing_verb_shows_help_on_stderr(cli: Cli, argv: list[str]) -> None:
    result = cli(*argv)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Usage: localllm")


@pytest.mark.parametrize("argv", [["frob"], ["--frob"], ["run", "--frob"], ["run", "m", "hi", "-n"]])
def test_unknown_words_are_a_sentence_and_exit_2(cli: Cli, argv: list[str]) -> None:
    result = cli(*argv)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "--help" in result.err


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["run", "--bogus"], "No such option: --bogus.", "localllm run --help"),
        (["run", "--temprature"], "No such option: --temprature. Did you mean --temperature?", "localllm run --help"),
        (["rum"], "No such command 'rum'. Did you mean 'rm', 'run'?", "localllm --help"),
        (
            ["run", "m", "hi", "-n", "x"],
            "Invalid value for '--max-tokens' / '-n': 'x' is not a whole number.",
            "localllm run --help",
        ),
        (["run", "m", "hi", "-t", "x"], "Invalid value for '--temperature' / '-t': 'x' is not a number.", None),
    ],
)
def test_a_mistyped_line_is_told_in_plain_words(cli: Cli, argv: list[str], message: str, hint: str | None) -> None:
    result = cli(*argv)
    assert result.err == f"error: {message}\nhint: {hint or 'localllm run --help'}\n"


def test_a_bad_variable_is_named_with_the_way_to_be_rid_of_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_TOP_K", "abc")
    result = cli("run", "m", "hi")
    assert (result.code, result.err) == (
        2,
        "error: LOCALLLM_TOP_K in the environment: 'abc' is not a whole number.\nhint: unset LOCALLLM_TOP_K\n",
    )


def test_usage_error_under_json_is_a_document_too(cli: Cli) -> None:
    result = cli("run", "m", "hi", "--json", "-n", "x")
    assert result.code == 2
    assert result.json()["error"]["code"] == "invalid_request"


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from localllm.cli.app import run_command; from localllm.cli import main\n"
        "run_command(sys.argv[1:], main.VERBS, main.GROUPS)\n"
        f"print(sorted(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    )
    for argv in (["--help"], ["run", "--help"], ["run"]):
        done = subprocess.run(
            [sys.executable, "-c", probe, *argv], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stderr.splitlines()[-1] == "[]", argv


def test_completion_offers_verbs_and_models() -> None:
    def offered(line: str) -> str:
        return _run(
            env={
                **os.environ,
                "_LOCALLLM_COMPLETE": "complete_bash",
                "COMP_WORDS": line,
                "COMP_CWORD": str(line.count(" ")),
            }
        ).stdout

    assert "run" in offered("localllm ru").split()
    assert "--max-tokens" in offered("localllm run --max").split()
    assert "smollm2:135m" in offered("localllm run smol").split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_shown_for_each_shell(shell: str) -> None:
    done = _run("--show-completion", shell, env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert done.returncode == 0
    assert "_LOCALLLM_COMPLETE" in done.stdout


def test_closed_reader_of_help_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([*COMMAND, "--help"], stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_under_help_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_closed_stdout_is_a_sentence_and_nothing_is_loaded() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m localllm run m hi <&- >&-"],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: Stdout is closed")


@pytest.mark.parametrize("delay_s", [0.03, 0.06, 0.1, 0.15, 0.25])
def test_interrupt_at_any_moment_of_the_start_leaves_no_traceback(delay_s: float) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "m"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode in (143, -signal.SIGTERM)
    assert out == b""
    assert b"Traceback" not in err


def test_ignored_interrupt_stays_ignored() -> None:
    """A shell starts background jobs so: Ctrl-C in the foreground must not end them."""
    script = f"trap '' INT; exec {sys.executable} -m localllm run m"
    process = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.6)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143


@pytest.mark.parametrize(("verb", "takes_text"), [("ps", False), ("ls", False), ("run", True), ("tokens", True)])
def test_a_word_too_many_is_a_matter_of_quotes_only_where_a_text_is_taken(
    cli: Cli, verb: str, takes_text: bool
) -> None:
    result = cli(verb, "one", "two", "three")
    assert (result.code, "needs quotes" in result.err) == (2, takes_text)
