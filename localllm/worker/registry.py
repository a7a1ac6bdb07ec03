"""Which servers of this user run here: one small locked file each, in the user's runtime folder.

The kernel gives a file's lock back when its server dies, however it dies; whoever reads next
drops the file of a dead one. Files count only where they are this user's alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import UsageError

_MAX_BYTES = 1 << 16
_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_HINT = "export XDG_RUNTIME_DIR=/a/folder/of/yours"


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """One running server: where it answers, and the file that says so. `started_s`: seconds since 1970."""

    pid: int
    started_s: float
    url: str
    socket: Path
    version: str
    file: Path


def runtime_folder() -> Path:
    """Return the folder of sockets and records of this user, whether it exists or not."""
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(named):
        return Path(named) / "localllm"
    usual = Path(f"/run/user/{os.geteuid()}")
    if sys.platform != "darwin" and usual.is_dir():
        return usual / "localllm"
    import tempfile

    return Path(tempfile.gettempdir()) / f"localllm-{os.geteuid()}"


def default_socket() -> Path:
    """Return where this process's private socket stands unless it is told another place."""
    return runtime_folder() / f"{os.getpid()}.sock"


class Registration:
    """This process's own record; `close` takes it away."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path

    def close(self) -> None:
        """Remove the record and give its lock back. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(self._path)):
                self._path.unlink()
        os.close(self._fd)
        self._fd = -1


def register(url: str, socket: Path) -> Registration:
    """Write and lock the record of this process. Raises UsageError where the folder is not this user's alone."""
    import json

    from localllm import __version__

    folder = ensure_folder()
    body = {"pid": os.getpid(), "started_s": time.time(), "url": url, "socket": str(socket), "version": __version__}
    path = folder / f"{os.getpid()}-{os.urandom(4).hex()}.json"
    draft = path.with_suffix(".new")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OWN, 0o600)
    try:
        _lock(fd)
        os.write(fd, json.dumps(body).encode())
        draft.rename(path)
    except BaseException:
        os.close(fd)
        draft.unlink(missing_ok=True)
        raise
    return Registration(fd, path)


def ensure_folder() -> Path:
    """Return the runtime folder, created with mode 0700. Raises UsageError where it is not this user's alone."""
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = os.lstat(folder)
    except OSError as error:
        raise UsageError(f"The runtime folder {folder} cannot be made: {error.strerror}.", _HINT) from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise UsageError(f"The runtime folder {folder} is not this user's.", _HINT)
    if facts.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def running() -> list[ServerRecord]:
    """Return the servers of this user, oldest first; records of dead ones are dropped. Never raises."""
    found = [record for path in _record_files() if (record := _read(path)) is not None]
    return sorted(found, key=lambda record: record.started_s)


def is_running(record: ServerRecord) -> bool:
    """Say whether the server of a record is still there."""
    return record.file.exists() and _read(record.file) is not None


def _record_files() -> Iterator[Path]:
    folder = runtime_folder()
    try:
        facts = os.lstat(folder)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return
        names = os.listdir(folder)
    except OSError:
        return
    yield from (folder / name for name in names if name.endswith(".json"))


def _read(path: Path) -> ServerRecord | None:
    """Return what a record says; None where it is no record of ours, or its server is dead (it is then dropped)."""
    try:
        fd = os.open(path, os.O_RDONLY | _OWN)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return None
        record = _parse(os.read(fd, _MAX_BYTES), path)
        if _is_locked(fd):
            return record
        _drop(path, record)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def _parse(data: bytes, path: Path) -> ServerRecord | None:
    import json

    try:
        body = json.loads(data)
        return ServerRecord(
            int(body["pid"]),
            float(body["started_s"]),
            str(body["url"]),
            Path(str(body["socket"])),
            str(body["version"]),
            path,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _drop(path: Path, record: ServerRecord | None) -> None:
    """Take away what a dead server left in the runtime folder."""
    path.unlink(missing_ok=True)
    if record is not None and record.socket.parent == path.parent:
        record.socket.unlink(missing_ok=True)


def _lock(fd: int) -> None:
    import fcntl  # not on Windows, where nothing is served

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_locked(fd: int) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    return False
