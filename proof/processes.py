"""Reads what processes cost: memory, descriptors, threads, CPU time, context switches."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

WORKER_MODULE = "localllm.worker.main"


@dataclass(frozen=True, slots=True)
class Usage:
    """One process at one moment. `anonymous_bytes`: resident and of no file; the same as `rss_bytes` off Linux."""

    rss_bytes: int
    anonymous_bytes: int
    n_fds: int
    n_threads: int


def usage(pid: int) -> Usage:
    """Return what a process holds. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    rss_bytes = process.memory_info().rss
    anonymous = _status(pid, "RssAnon")
    return Usage(
        rss_bytes=rss_bytes,
        anonymous_bytes=rss_bytes if anonymous is None else anonymous * 1024,
        n_fds=process.num_fds(),
        n_threads=process.num_threads(),
    )


def workers_of(server_pid: int) -> list[int]:
    """Return the pids of the workers of a server, oldest first; [] once it is gone."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if WORKER_MODULE in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((child.create_time(), child.pid))
    return [pid for _, pid in sorted(found)]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, to the nanosecond on Linux. Raises psutil.NoSuchProcess.

    There: of the threads that still live. A thread that ended in between is not counted.
    """
    total_ns, n_threads = 0, 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError, ValueError):
            total_ns += int((task / "schedstat").read_text().split()[0])
            n_threads += 1
    if n_threads and total_ns:
        return total_ns / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def context_switches(pid: int) -> int:
    """Return how often the threads of a process gave up or lost a core so far. Raises psutil.NoSuchProcess."""
    total = 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            for line in (task / "status").read_text().splitlines():
                if line.startswith(("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")):
                    total += int(line.split()[1])
    if total:
        return total
    switches = psutil.Process(pid).num_ctx_switches()
    return int(switches.voluntary + switches.involuntary)


def _tasks(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _status(pid: int, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return None


def leave_nothing_when_terminated() -> None:
    """Let SIGTERM end this program as Ctrl-C does: through every clean-up, so that no server is left."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
