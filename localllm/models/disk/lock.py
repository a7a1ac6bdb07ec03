"""One owner per model across processes: an flock, which the kernel releases when its owner dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import Unavailable
from localllm.models.disk import files

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock, as far as the file tells (a sentence for people; the flock decides)."""

    pid: int | None
    started_at: str

    def __str__(self) -> str:
        who = f"process {self.pid}" if self.pid else "another process"
        return f"{who} (since {self.started_at})" if self.started_at else who


class Busy(Unavailable):
    """Another process holds the lock."""

    code = "busy"


@contextlib.contextmanager
def hold(path: Path, *, on_wait: Callable[[Owner], None] | None) -> Iterator[None]:
    """Hold the lock file at `path`; the folder is created.

    `on_wait` None: do not wait. Else it is called while another process holds the lock, and may raise.
    Raises Busy (not waiting), OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _acquire(path, on_wait)
    try:
        _sign(fd)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)


def _acquire(path: Path, on_wait: Callable[[Owner], None] | None) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | files.OWN, 0o600)
        try:
            if _try_lock(fd) and _same_file(fd, path):
                return fd
            owner = _read_owner(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if on_wait is None:
            raise Busy(f"{path.stem} is in use by {owner}", "localllm ls")
        on_wait(owner)
        time.sleep(_POLL_S)


def _try_lock(fd: int) -> bool:
    import fcntl  # not on Windows, where listing must still work

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _same_file(fd: int, path: Path) -> bool:
    """Tell whether the name still leads to the locked file (someone may have emptied the folder)."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(fd: int) -> None:
    mark = json.dumps({"pid": os.getpid(), "started_at": time.strftime("%Y-%m-%d %H:%M:%S")})
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, mark.encode(), 0)


def _read_owner(fd: int) -> Owner:
    try:
        mark = json.loads(os.pread(fd, 4096, 0))
        return Owner(int(mark["pid"]), str(mark["started_at"])[:40])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Owner(None, "")
