"""What a worker does to its own process before native code: no dumps, no orphans, no signals meant for others."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import stat
import sys

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def harden() -> None:
    """Apply everything that needs no wish of the supervisor's; what the system does not have is left out.

    Call it before threads are started and before native code is loaded.
    """
    os.environ["GGML_NO_BACKTRACE"] = "1"  # else an abort forks gdb first, where there is one
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)  # a terminal's keys reach the whole group; the supervisor decides
    _dump_nothing()
    _die_with_parent()
    _tell_system("/proc/self/oom_score_adj", _OOM_SCORE)
    _leave_terminal()


def take_niceness(niceness: int) -> None:
    """Yield the processor to others by `niceness`; threads started later take it over."""
    if niceness:
        with contextlib.suppress(OSError):
            os.nice(niceness)


def _dump_nothing() -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _tell_system("/proc/self/coredump_filter", "0")  # a dump that is piped to a program knows no limit


def _die_with_parent() -> None:
    """Let the kernel kill this process with the thread that started it, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _leave_terminal() -> None:
    """Take stdin and stdout off whatever they were; never wait for a reader of stderr."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 1:
        os.close(null)
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(2).st_mode):
            os.set_blocking(2, False)


def _tell_system(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(text)
