"""Worker processes: what they inherit, what of their stderr is kept, and that they go."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from localllm.worker.process import StderrReader, WorkerProcess
from tests.worker.asynchronous import nothing_left, run

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for modules that only this test's processes can import."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def module(folder: Path, body: str) -> str:
    """Write a module to be started as a worker; return its name."""
    (folder / "started_by_test.py").write_text(f"import os, socket, sys, time\nstart = time.time()\n{body}")
    return "started_by_test"


def read(data: bytes, *, n_pieces: int = 1) -> StderrReader:
    reader = StderrReader()
    size = -(-len(data) // n_pieces)
    for at in range(0, len(data), size):
        reader.data_received(data[at : at + size])
    reader.connection_lost(None)
    return reader


def test_it_inherits_its_socket_and_board_and_ends_with_its_code(importable: Path) -> None:
    body = (
        "from localllm.worker.board import StepBoard\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        "StepBoard.attach(int(sys.argv[2])).began([7], 0.5)\n"
        "sock.sendall(b'here')\n"
        "sock.recv(1)\n"
        "os._exit(9)\n"
    )

    async def work() -> None:
        exits: list[int] = []
        process = WorkerProcess(lambda: exits.append(1), module(importable, body))
        await process.listen()
        loop = asyncio.get_running_loop()
        process.socket.setblocking(False)
        assert await loop.sock_recv(process.socket, 10) == b"here"
        assert process.returncode is None
        assert process.board.read().numbers == (7,)
        process.socket.close()
        assert await process.wait(20) == 9
        assert exits == [1]
        assert process.board.read().numbers == (7,)
        process.dispose()
        process.dispose()

    with nothing_left():
        run(work())


@pytest.mark.parametrize("n_turns", range(5))
def test_who_waits_for_its_end_can_be_cancelled_as_it_ends(importable: Path, n_turns: int) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        was_waiting: list[bool] = []

        def cancel_after(turns: int) -> None:
            if turns:
                loop.call_soon(cancel_after, turns - 1)
            else:
                was_waiting.append(waiting.cancel())

        process = WorkerProcess(lambda: cancel_after(n_turns), module(importable, "time.sleep(60)"))
        waiting = asyncio.create_task(process.wait(30))
        await asyncio.sleep(0.05)
        process.kill()
        await asyncio.wait({waiting})
        assert waiting.cancelled() == was_waiting[0]
        process.dispose()

    with nothing_left():
        run(work())


def test_it_gets_no_secrets_no_group_of_ours_and_no_modules_of_the_current_folder(
    importable: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.mktemp("here")
    (here / "planted.py").write_text("")
    monkeypatch.chdir(here)
    for name in ("LOCALLLM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    body = (
        "import importlib.util\n"
        "assert 'secret' not in os.environ.values()\n"
        "assert os.getpgrp() == os.getpid()\n"
        "assert importlib.util.find_spec('planted') is None\n"
        "assert sys.stdin.read() == ''\n"
        "os.write(1, b'nobody reads this')\n"
        "left = {int(n) for n in os.listdir('/proc/self/fd')} if sys.platform == 'linux' else set()\n"
        "assert len(left - {0, 1, 2, int(sys.argv[1]), int(sys.argv[2])}) <= 1, left\n"
        "os._exit(9)\n"
    )

    async def work() -> None:
        process = WorkerProcess(lambda: None, module(importable, body))
        await process.listen()
        assert await process.wait(20) == 9, process.stderr.lines
        process.dispose()

    with nothing_left():
        run(work())


@pytest.mark.parametrize("stopped", [False, True])
def test_what_does_not_end_by_itself_is_killed(importable: Path, stopped: bool) -> None:
    async def work() -> None:
        process = WorkerProcess(lambda: None, module(importable, "time.sleep(1000)"))
        await process.listen()
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        assert await process.wait(0.05) == -signal.SIGKILL
        process.kill()
        process.dispose()

    with nothing_left():
        run(work())


def test_a_wait_that_is_cancelled_kills_too(importable: Path) -> None:
    async def work() -> None:
        process = WorkerProcess(lambda: None, module(importable, "time.sleep(1000)"))
        await process.listen()
        waiting = asyncio.create_task(process.wait(1000))
        await asyncio.sleep(0.01)
        waiting.cancel()
        assert await process.wait(1000) == -signal.SIGKILL
        process.dispose()

    with nothing_left():
        run(work())


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    async def work() -> None:
        with pytest.raises(OSError):
            WorkerProcess(lambda: None)

    with nothing_left():
        run(work())


def test_a_flood_on_stderr_slows_its_writer_not_this_loop(importable: Path) -> None:
    body = (
        "line = b'text of somebody that nobody may see\\n' * 25000\n"
        "for _ in range(6): os.write(2, line)\n"
        "os.write(2, b'/src/x.cpp:1: GGML_ASSERT(ok) failed\\n')\n"
        "os.abort()\n"
    )

    async def work() -> None:
        process = WorkerProcess(lambda: None, module(importable, body))
        await process.listen()
        longest_s, last_s = 0.0, asyncio.get_running_loop().time()
        while process.returncode is None or not process.stderr.ended.is_set():
            await asyncio.sleep(0.001)
            now_s = asyncio.get_running_loop().time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert longest_s < 0.5
        assert list(process.stderr.lines) == ["/src/x.cpp:1: GGML_ASSERT(ok) failed"]
        assert process.stderr.n_other_lines == 150_000
        assert await process.wait(1) == -signal.SIGABRT
        process.dispose()

    with nothing_left():
        run(work())


SAFE = [
    ("/llama.cpp/ggml/src/ggml.c:1234: GGML_ASSERT(a->ne[0] == b) failed", None),
    ("terminate called after throwing an instance of 'std::bad_alloc'", None),
    ("terminate called without an active exception", None),
    ("free(): double free detected in tcache 2", None),
    ("double free or corruption (!prev)", None),
    ("corrupted size vs. prev_size", None),
    ("malloc(): invalid size (unsorted)", None),
    ("*** stack smashing detected ***: terminated", "*** stack smashing detected ***"),
    ("Fatal Python error: Segmentation fault", None),
    ("ModuleNotFoundError: No module named 'llama_cpp'", None),
    ("/usr/bin/python: No module named localllm.worker.main", None),
    ("UnicodeDecodeError: 'utf-8' codec can't decode b'secret'", "UnicodeDecodeError"),
    ("localllm.worker.protocol.BadFrame: secret", None),
    ("MemoryError", "MemoryError"),
]


@pytest.mark.parametrize(("line", "kept"), SAFE)
@pytest.mark.parametrize("n_pieces", [1, 7])
def test_lines_that_are_known_to_be_safe_are_kept(line: str, kept: str | None, n_pieces: int) -> None:
    reader = read(f"noise\n{line}\nmore noise\n".encode(), n_pieces=n_pieces)
    expected = [] if "BadFrame" in line else [kept or line]
    assert list(reader.lines) == expected
    assert reader.n_other_lines == 3 - len(expected)


@pytest.mark.parametrize(
    "line",
    [
        "the user said: GGML_ASSERT(secret) failed",
        "  what():  secret",
        "GGML_ASSERT(secret)",
        "x.c:1: GGML_ASSERT(\x1b[2J) failed",
        "x.c:1: secret",
        "secret" * 1000,
        "Traceback (most recent call last):",
    ],
)
def test_other_lines_are_counted_only(line: str) -> None:
    reader = read(line.encode())
    assert list(reader.lines) == []
    assert reader.n_other_lines == 1


def test_lines_are_cut_and_only_the_newest_are_kept() -> None:
    long = "/a.c:1: GGML_ASSERT(" + "x" * 500 + ") failed"
    assert list(read(long.encode()).lines) == []
    many = "".join(f"/a.c:{i}: GGML_ASSERT(x) failed\n" for i in range(1000))
    assert [line.split(":")[1] for line in read(many.encode()).lines] == [str(i) for i in range(980, 1000)]


def test_bytes_without_a_line_end_do_not_pile_up() -> None:
    reader = StderrReader()
    for _ in range(100):
        reader.data_received(b"x" * 10_000)
    reader.data_received(b"\n/a.c:1: GGML_ASSERT(x) failed\n")
    assert list(reader.lines) == ["/a.c:1: GGML_ASSERT(x) failed"]
    assert reader.n_other_lines == 1
