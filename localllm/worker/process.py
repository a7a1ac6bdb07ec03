"""A worker's process: its start, what it says on stderr, its end. On the event loop, never waiting in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable

from localllm.worker.board import StepBoard
from localllm.worker.lifecycle import KEEPING_LINE

MODULE = "localllm.worker.main"
"""Started as `python -P -m MODULE SOCKET_FD BOARD_FD`, in a process group of its own."""

_SECRETS = ("LOCALLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_MAX_LINE_CHARS = 200
_MAX_KEPT_LINES = 20
_MAX_SEEN_LINES = 200
_BURST_BYTES = 1 << 20
_PAUSE_S = 0.25
_LAST_WORDS_S = 0.2

# What native libraries and the interpreter print as they end a process; none of it quotes data.
_SAFE_LINE = re.compile(
    rb"[\w./+-]+:\d+: GGML_ASSERT\([\x20-\x7e]*\) failed"
    rb"|terminate called (?:after throwing an instance of '[\w:<>, ]+'|without an active exception)"
    rb"|(?:free|malloc|realloc|munmap_chunk)\(\): [\w ():,!<>-]+"
    rb"|double free or corruption[\w ()!]*"
    rb"|corrupted [\w .-]+"
    rb"|\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*"
    rb"|Fatal Python error: [\w ,:-]+"
    rb"|(?:ModuleNotFoundError|[\w./-]+): No module named '?[\w.]+'?"
    rb"|[\w.]+(?:Error|Exception)(?=:|$)"
)


class StderrReader(asyncio.Protocol):
    """Reads what a worker prints: keeps the newest lines that are known to be safe, counts the others.

    `is_keeping`: it has said that it ends, once what it keeps is on disk.
    A flood is read slowly, so that it holds up the one who prints, not this process.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MAX_KEPT_LINES)
        self.n_other_lines = 0
        self.is_keeping = False
        self.ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None
        self._rest = b""
        self._n_burst_bytes = 0
        self._resume: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember whom to pause."""
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Look at the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_CHARS:
            self._rest = self._rest[:_MAX_LINE_CHARS]
        self.n_other_lines += max(0, len(lines) - _MAX_SEEN_LINES)
        for line in lines[-_MAX_SEEN_LINES:]:  # why it ends is said last
            self._look_at(line)
        self._n_burst_bytes += len(data)
        if self._n_burst_bytes > _BURST_BYTES and self._transport is not None:
            self._transport.pause_reading()
            self._resume = asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on)

    def connection_lost(self, error: Exception | None) -> None:
        """Look at a last line without an end."""
        if self._rest:
            self._look_at(self._rest)
        self._transport = None
        self.close()
        self.ended.set()

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
        if self._transport is not None:
            self._transport.close()

    def _go_on(self) -> None:
        self._n_burst_bytes = 0
        if self._transport is not None:
            self._transport.resume_reading()

    def _look_at(self, line: bytes) -> None:
        if line.strip() == KEEPING_LINE:
            self.is_keeping = True
            return
        match = _SAFE_LINE.match(line[:_MAX_LINE_CHARS].strip())
        if match is None:
            self.n_other_lines += bool(line.strip())
        else:
            self.lines.append(match[0].decode("ascii", "replace"))


class WorkerProcess:
    """One process from its start to its last trace, for the event loop that it was started on.

    `socket`: our end of the connection to it. `board`: what its engine's thread is at, readable also
    after its death. `returncode`: None while it is there; negative = the signal that ended it.
    """

    def __init__(self, on_exit: Callable[[], None], module: str = MODULE) -> None:
        """Start it; `on_exit` is called once, when it is gone. Raises OSError, and then leaves nothing behind."""
        self.returncode: int | None = None
        self.stderr = StderrReader()
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._exited = asyncio.Event()
        with contextlib.ExitStack() as undo:
            self.board, board_fd = StepBoard.create()
            undo.callback(self.board.close)
            try:
                self.socket, theirs = socket.socketpair()
                undo.callback(self.socket.close)
                with theirs:
                    self._popen = _start(module, theirs.fileno(), board_fd)
            finally:
                os.close(board_fd)
            undo.pop_all()
        self.pid = self._popen.pid
        threading.Thread(target=self._await_exit, name=f"localllm-wait-{self.pid}", daemon=True).start()

    async def listen(self) -> None:
        """Begin to read what it prints."""
        await self._loop.connect_read_pipe(lambda: self.stderr, self._popen.stderr)

    def kill(self) -> None:
        """End it at once, whatever it is at (a stopped one too). Idempotent."""
        self._popen.kill()

    async def has_ended(self, within_s: float) -> bool:
        """Say whether it is gone, after at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._exited.wait()
        return self._exited.is_set()

    async def wait(self, grace_s: float) -> int:
        """Wait until it is gone, by force after `grace_s`, and its last words were read. Return its code."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):  # wait_for may swallow a cancellation of this very moment
                    await self._exited.wait()
        finally:
            if self.returncode is None:
                self.kill()
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.stderr.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def dispose(self) -> None:
        """Close what is left of it here. The board is of no use afterwards."""
        self.socket.close()
        self.stderr.close()
        if self._popen.stderr is not None:
            self._popen.stderr.close()
        self.board.close()

    def _await_exit(self) -> None:
        """Wait on a thread; where it can be left to the loop to reap, its id cannot become another's before."""
        if sys.platform == "linux":
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        self.returncode = self._popen.wait()
        self._exited.set()
        self._on_exit()


def _start(module: str, socket_fd: int, board_fd: int) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that finds the modules that this one finds, and no secrets.

    -P: what lies in the current folder is nobody's module.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(socket_fd), str(board_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(socket_fd, board_fd),
        env=environment,
        process_group=0,
        bufsize=0,
    )
