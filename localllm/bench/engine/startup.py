"""Times a command from its start to its first byte of output, and reads its peak resident memory."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from localllm.errors import LocalLLMError, TimedOut
from localllm.models.system import resident_bytes

SETTLE_S = 0.3
"""How long a command goes on after its first byte before its memory is read."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds to the first byte on stdout, and the most memory that was resident."""

    first_byte_s: float
    peak_rss_bytes: int


def start(command: Sequence[str], *, timeout_s: float = 120.0) -> Start:
    """Run `command` until its first byte of output and a moment longer, then interrupt it.

    Its stdin is a pipe that stays open until its memory was read.
    Raises: LocalLLMError when it ends without output; TimedOut.
    """
    return _start(command, stdin=subprocess.PIPE, timeout_s=timeout_s)


def start_detached(command: Sequence[str], *, timeout_s: float = 120.0) -> Start:
    """Like `start`, with nothing on stdin: for `localllm run`, which takes piped text as a prompt."""
    return _start(command, stdin=subprocess.DEVNULL, timeout_s=timeout_s)


def _start(command: Sequence[str], *, stdin: int, timeout_s: float) -> Start:
    with tempfile.TemporaryFile() as errors:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            got = _first_byte(process.stdout, timeout_s)
            first_byte_s = time.perf_counter() - begun
            if not got:
                raise _no_output(process, errors, ended=got is not None, timeout_s=timeout_s)
            return Start(first_byte_s, _settled_peak(process))
        finally:
            _stop(process)


def _first_byte(stdout: IO[bytes], timeout_s: float) -> bytes | None:
    """Return the first byte, b"" at the end of output, None when the time is up."""
    import select

    ready, _, _ = select.select([stdout], [], [], timeout_s)
    return os.read(stdout.fileno(), 1) if ready else None


def _settled_peak(process: subprocess.Popen[bytes]) -> int:
    """Return the peak of a process that goes on for a moment; the newest that could be read."""
    peak = peak_rss_bytes(process.pid)
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until and process.poll() is None:
        time.sleep(SETTLE_S / 6)
        peak = max(peak, peak_rss_bytes(process.pid))
    return peak


def peak_rss_bytes(pid: int) -> int:
    """Return the most memory that process `pid` had resident; 0 where it cannot be read.

    On Linux the kernel's high-water mark of this program alone: what `wait4` reports also counts
    the parent it was forked from. Elsewhere what is resident now.
    """
    if Path("/proc/self/status").exists():
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0
        lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(lines[0].split()[1]) * 1024 if lines else 0
    return resident_bytes(pid)


def _no_output(process: subprocess.Popen[bytes], errors: IO[bytes], *, ended: bool, timeout_s: float) -> LocalLLMError:
    if not ended:
        return TimedOut(f"{process.args[0]!s} wrote nothing within {timeout_s:g} s.")  # type: ignore[index]
    code = process.wait(timeout=10)
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    return LocalLLMError(f"A start that was to be timed ended with code {code}: {said[-1] if said else 'no message'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that we started: close its pipes, then ask, then insist."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def interleaved(ours: Callable[[], Start], bare: Callable[[], Start]) -> Iterator[tuple[Start, Start]]:
    """Yield pairs (ours, bare) without end, each side first in turn, after one of each that is not counted."""
    ours()
    bare()
    while True:
        first = ours()
        yield first, bare()
        second = bare()
        yield ours(), second
