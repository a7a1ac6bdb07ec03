"""`run` and `chat` as processes on the real model: pipes, signals at every stage, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
COMMAND = [sys.executable, "-m", "localllm"]
LONG = "Write a long story about a lighthouse keeper."


def _run(*argv: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*COMMAND, *argv], capture_output=True, text=True, check=False, timeout=120, **more
    )


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    """Kill what a failed test leaves running: it would slow every test after it."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _start(*argv: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*COMMAND, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    _started.append(process)
    return process


def _read_some(process: subprocess.Popen[bytes], n_bytes: int) -> bytes:
    """Read from its stdout until the answer has begun."""
    assert process.stdout is not None
    data = b""
    while len(data) < n_bytes:
        piece = process.stdout.read(n_bytes - len(data))
        assert piece, "it ended before the answer began"
        data += piece
    return data


def test_answer_and_nothing_else_is_on_stdout(smollm2: Path) -> None:
    done = _run("run", str(smollm2), "Say hello.", "-n", "12", "--seed", "1", stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stdout.endswith("\n")
    assert done.stderr == "" or done.stderr.startswith("note: ")


def test_same_seed_gives_the_same_answer(smollm2: Path) -> None:
    texts = {_run("run", str(smollm2), "-n", "16", "--seed", "7", input="Say hello.").stdout for _ in range(2)}
    assert len(texts) == 1


def test_json_document_names_the_model(smollm2: Path) -> None:
    done = _run("run", str(smollm2), "-n", "8", "-t", "0", "--json", input="Say hello.")
    document = json.loads(done.stdout)
    assert document["usage"]["completion_tokens"] <= 8
    assert document["model"]["quant"] == "Q4_1"
    assert document["usage"]["prompt_tokens"] > 5


def test_prompt_beyond_the_context_is_exit_5_with_both_numbers(smollm2: Path) -> None:
    done = _run("run", str(smollm2), "--ctx", "256", input="word " * 1000)
    assert (done.returncode, done.stdout) == (5, "")
    assert "256" in done.stderr
    assert "10" in done.stderr


def test_file_that_is_no_model_is_exit_3(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    done = _run("run", str(path), "hi", stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")


def test_unknown_model_is_exit_3_with_the_next_command() -> None:
    done = _run("run", "no-such-model", "hi", stdin=subprocess.DEVNULL)
    assert done.returncode == 3
    assert "hint: " in done.stderr


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_any_moment_ends_without_a_traceback(smollm2: Path, number: int, delay_s: float) -> None:
    process = _start("run", str(smollm2), LONG, "-n", "400")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(number)
    started_s = time.monotonic()
    out, err = process.communicate(timeout=30)
    # Before the interpreter has come to `main`, the signal itself ends it, or Python's own handler.
    if delay_s > 0.15:
        assert process.returncode == 128 + number
        assert b"Traceback" not in err
    assert not out or out.endswith(b"\n")
    assert time.monotonic() - started_s < 10


def test_interrupt_during_the_answer_keeps_what_there_is(smollm2: Path) -> None:
    process = _start("run", str(smollm2), LONG, "-n", "1500")
    first = _read_some(process, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert err == b""


def test_interrupted_json_is_a_document(smollm2: Path) -> None:
    process = _start("run", str(smollm2), LONG, "-n", "1500", "--json", "--ctx", "2048")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    document = json.loads(out)
    assert document.get("finish_reason") == "cancelled" or document["error"]["code"] == "interrupted"


def test_interrupt_while_a_long_prompt_is_read(smollm2: Path) -> None:
    process = _start("run", str(smollm2), "word " * 6000)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    started_s = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - started_s < 8


def test_timeout_ends_it(smollm2: Path) -> None:
    started_s = time.monotonic()
    done = _run("run", str(smollm2), LONG, "-n", "2000", "--timeout", "2.5", stdin=subprocess.DEVNULL)
    assert done.returncode == 124
    assert "time limit" in done.stderr
    assert time.monotonic() - started_s < 15


def test_reader_that_leaves_ends_the_work(smollm2: Path) -> None:
    process = _start("run", str(smollm2), LONG, "-n", "1500")
    _read_some(process, 10)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(30), err) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_a_sentence(smollm2: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", str(smollm2), "hi", "-n", "4"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_chat_turns_reuse_the_conversation(smollm2: Path) -> None:
    script = "My name is Ada.\n/stats\nWhat is my name?\n/stats\n"
    done = _run("chat", str(smollm2), "-n", "24", "-t", "0", "--ctx", "1024", input=script)
    assert done.returncode == 0
    first, second = [line for line in done.stderr.splitlines() if "cached" in line]
    assert "(0 cached)" in first
    n_cached = int(second.split("(")[1].split()[0])
    assert n_cached > 20


WITHOUT_TOOLKIT = "import sys; sys.modules['prompt_toolkit'] = None; from localllm.cli.main import main; main()"


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", WITHOUT_TOOLKIT]], ids=["toolkit", "readline"])
def test_chat_at_a_terminal(smollm2: Path, command: list[str]) -> None:
    """Type a turn, interrupt an answer, ask for the count, leave with Ctrl-D."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(command[0], [*command, "chat", str(smollm2), "-n", "300", "--ctx", "1024"])
    try:
        seen = b""

        def wait_for(text: bytes, timeout_s: float = 60) -> None:
            nonlocal seen
            end_s = time.monotonic() + timeout_s
            while text not in seen:
                assert time.monotonic() < end_s, seen
                if select.select([master], [], [], 0.2)[0]:
                    seen += os.read(master, 65536)

        wait_for(b">>>")
        seen = b""
        os.write(master, LONG.encode() + b"\r")
        time.sleep(3)
        os.write(master, b"\x03")
        wait_for(b">>>")
        seen = b""
        os.write(master, b"/tokens\r")
        wait_for(b"of 1024 tokens")
        seen = seen[seen.index(b"of 1024 tokens") :]
        wait_for(b">>>")
        os.write(master, b"\x04")
        with contextlib.suppress(OSError):  # the terminal goes away with its last process
            while select.select([master], [], [], 30)[0] and (piece := os.read(master, 65536)):
                seen += piece
        os.close(master)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"Traceback" not in seen
