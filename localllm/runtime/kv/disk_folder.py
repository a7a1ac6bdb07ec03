"""Whether a folder can hold what the disk tier keeps; if not, what is wrong with it, and the next step."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import pasteable

_ELSEWHERE = "export LOCALLLM_KV_DIR=/a/folder"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a folder cannot be used: `what` names it, `advice` is the next command to type."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what} ({self.advice})"


def trouble_with(folder: Path) -> Trouble | None:
    """Return why nothing can be kept in a folder, which need not be there yet; None where it can. Changes nothing."""
    try:
        return _look(folder)
    except OSError as error:
        return trouble_of(folder, error)


def trouble_of(folder: Path, error: OSError) -> Trouble:
    """Return what a failure says is wrong with a folder, without another look at it."""
    return _trouble(folder, error.strerror or str(error))


def _trouble(folder: Path, why: str, advice: str = _ELSEWHERE) -> Trouble:
    return Trouble(f"{folder} cannot be used: {why}", advice)


def _look(folder: Path) -> Trouble | None:
    """Judge the folder, or where it is not there, the nearest that is. Raises OSError where that cannot be told."""
    there = _nearest(folder)
    is_there = there == folder
    name = "it" if is_there else str(there)
    kind = _kind(there, may_be_link=not is_there)
    if kind:
        real = Path(os.path.realpath(there))
        is_elsewhere = real != there and real.is_dir()
        return _trouble(
            folder, f"{name} is {kind}", pasteable("export", f"LOCALLLM_KV_DIR={real}") if is_elsewhere else _ELSEWHERE
        )
    facts = os.stat(there)
    own = pasteable("chmod", "700", str(folder))
    if is_there and facts.st_uid != os.geteuid():
        return _trouble(folder, "it belongs to another user")
    if is_there and facts.st_mode & 0o022:
        return _trouble(folder, "others can write to it", own)
    if not os.access(there, os.W_OK | os.X_OK):
        is_closed = is_there and facts.st_mode & 0o700 != 0o700
        return _trouble(folder, f"{name} cannot be written", own if is_closed else _ELSEWHERE)
    if not os.statvfs(there).f_blocks:
        return _trouble(folder, f"{there} has no room for files")
    return None


def _nearest(folder: Path) -> Path:
    """Return the folder, or of those that it would be made in the first that is there. Raises OSError."""
    for path in (folder, *folder.parents):
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return path
    return folder


def _kind(path: Path, *, may_be_link: bool) -> str:
    """Return what a path is instead of a folder; "" where it is one. Raises OSError."""
    is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return "a link that leads nowhere"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a link that leads in a circle"
        raise
    if not stat.S_ISDIR(facts.st_mode):
        return "a file" if stat.S_ISREG(facts.st_mode) else "not a folder"
    return "a link" if is_link and not may_be_link else ""
