"""File operations that leave either the old or the new state, and never follow a planted link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Not inherited by children, and never through a planted link (where the system knows these flags).
OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ_FLAGS = os.O_RDONLY | OWN | getattr(os, "O_NONBLOCK", 0)
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OWN


def token() -> str:
    """Return a name that nobody else has."""
    return os.urandom(8).hex()


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte of `data` to `fd`. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_own_folder(folder: Path) -> None:
    """Make a folder for this user alone, where there is none.

    Raises OSError, also where it is a link, another user's, or can be written by others.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"{folder} is not a folder of this user")
    if facts.st_mode & 0o022:
        raise OSError(errno.EPERM, f"{folder} can be written by others")


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Put `data` at `path` whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Raises OSError; the old content is then still there.
    """
    temporary = path.with_name(f".{token()}.tmp")
    fd = os.open(temporary, _CREATE_FLAGS, mode)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Raises FileNotFoundError, and OSError for links, folders, pipes, and files over the limit.
    """
    fd = os.open(path, _READ_FLAGS)
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{path} is not a regular file")
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(f"{path} is larger than {limit_bytes} bytes")
    return data


class Identity(NamedTuple):
    """What is equal as long as a file's content is, short of reading it.

    `changed_ns` is the system's own: what rewrites a file can set `modified_ns` back.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Identity:
        """Return that of the file at `path`, links followed. Raises OSError."""
        facts = os.stat(path)
        return cls(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def is_regular(path: Path) -> bool:
    """Tell whether `path` is a regular file and no link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Tell whether `path` is a folder and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def set_aside(path: Path) -> Path | None:
    """Rename a bad file to `NAME.bad` beside it; None where that cannot be done."""
    for target in (path.with_name(path.name + ".bad"), path.with_name(f"{path.name}.{token()}.bad")):
        with contextlib.suppress(OSError):
            os.replace(path, target)
            return target
    return None


def remove_tree(path: Path) -> None:
    """Delete a file, a link (never its target) or a folder with all in it. Raises OSError."""
    if is_folder(path):
        import shutil  # costs 10 ms at start-up, and nothing else here needs it

        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sizes_below(folder: Path) -> Iterator[int]:
    for base, _, names in os.walk(folder, onerror=None, followlinks=False):
        for name in names:
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.join(base, name))
                if stat.S_ISREG(facts.st_mode):
                    yield facts.st_size


def tree_bytes(folder: Path) -> int:
    """Return the bytes of the regular files below `folder`, links not followed; 0 where unreadable."""
    return sum(_sizes_below(folder))


def largest_bytes(folder: Path) -> int:
    """Return the size of the largest regular file below `folder`; 0 where there is none."""
    return max(_sizes_below(folder), default=0)
