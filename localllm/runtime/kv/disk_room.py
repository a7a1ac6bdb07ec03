"""How much may lie in the folder and be written a day, counted over all processes that share it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.models.disk import files, lock
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX

_TEMPORARY = re.compile(r"^\.(\d+)\.[0-9a-f]+\.tmp$")
_OLD_TEMPORARY_S = 3600.0
_LEFT_SHARE = 0.95  # of the budget, once something had to go: so not for every block anew
_COUNT_BYTES = 16 << 20  # are written between two looks into the day's file
_BAD_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class _Seen:
    path: Path
    n_bytes: int
    used_s: float
    is_pinned: bool


def temporary_name() -> str:
    """Return a name for a file that is being written; it tells who writes."""
    return f".{os.getpid()}.{files.token()}.tmp"


class DayBudget:
    """Bytes written today, by all processes. Used by the writer's thread, read by any."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._day = ""
        self._told_bytes = 0  # what the file says
        self._own_bytes = 0  # written since

    @property
    def spent_bytes(self) -> int:
        """What was written today, as far as it is known here."""
        return self._told_bytes + self._own_bytes if self._day == _today() else 0

    @property
    def is_spent(self) -> bool:
        """Say whether nothing more may be written today."""
        return self.spent_bytes >= self._limit_bytes

    @property
    def is_half_spent(self) -> bool:
        """Say whether only what is used again is still written."""
        return self.spent_bytes >= self._limit_bytes / 2

    def refresh(self) -> None:
        """Add what was written here to the day's file, and learn what others wrote. Raises OSError."""
        day = _today()
        if self._day != day:
            self._day, self._told_bytes, self._own_bytes = day, 0, 0
        with contextlib.suppress(lock.Busy), lock.hold(self._folder / "daily.lock", on_wait=None):
            told = _read_day(self._folder / "daily.json", day)
            self._told_bytes = told + self._own_bytes
            if self._own_bytes:
                text = json.dumps({"day": day, "bytes": self._told_bytes})
                files.write_atomic(self._folder / "daily.json", text.encode(), mode=0o600)
                self._own_bytes = 0

    def spend(self, n_bytes: int) -> None:
        """Count bytes that were written."""
        if self._day != _today():
            self._day, self._told_bytes, self._own_bytes = _today(), 0, 0
        self._own_bytes += n_bytes
        if self._own_bytes >= _COUNT_BYTES:
            with contextlib.suppress(OSError):
                self.refresh()


class FolderRoom:
    """Keeps the folder within its budget and its age. Used by the writer's thread alone."""

    def __init__(self, folder: Path, limit_bytes: int, age_s: float) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._age_s = age_s
        self.used_bytes = 0
        self.n_evicted = 0

    def sweep(self, need_bytes: int = 0) -> None:
        """Count what lies there; delete what is too old, half-written or over the budget, least recently used first."""
        now_s = time.time()
        seen = []
        for one in _blocks(self._folder, now_s):
            if not one.is_pinned and now_s - one.used_s > self._age_s:
                self._delete(one)
            else:
                seen.append(one)
        self.used_bytes = sum(one.n_bytes for one in seen)
        if self.used_bytes + need_bytes <= self._limit_bytes:
            return
        target_bytes = int(self._limit_bytes * _LEFT_SHARE) - need_bytes
        for one in sorted((one for one in seen if not one.is_pinned), key=lambda one: one.used_s):
            if self.used_bytes <= target_bytes:
                break
            self._delete(one)
            self.used_bytes -= one.n_bytes

    def make_room(self, n_bytes: int) -> bool:
        """Make room for a file; False = there is none to be had."""
        if self.used_bytes + n_bytes > self._limit_bytes:
            self.sweep(n_bytes)
        return self.used_bytes + n_bytes <= self._limit_bytes

    def _delete(self, one: _Seen) -> None:
        with contextlib.suppress(OSError):
            one.path.unlink()
            self.n_evicted += 1


def survey(folder: Path) -> Iterator[tuple[Path, int, float, bool]]:
    """Yield every block file below a folder: path, bytes, when it was last used (Unix seconds), whether pinned."""
    for one in _blocks(folder, None):
        yield one.path, one.n_bytes, one.used_s, one.is_pinned


def _blocks(folder: Path, sweep_s: float | None) -> Iterator[_Seen]:
    """Yield the block files of all engines; with `sweep_s` (now), what writers that died left behind is deleted."""
    for engine in _folders(folder):
        for part in _folders(engine):
            for entry in _entries(part):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                        pinned = entry.name.endswith(PINNED_SUFFIX)
                        used_s = min(facts.st_mtime, time.time())  # a clock that was set back makes nothing younger
                        yield _Seen(Path(entry.path), facts.st_size, used_s, pinned)
                    elif sweep_s is not None and _is_left_behind(entry.name, facts.st_mtime, sweep_s):
                        os.unlink(entry.path)


def _is_left_behind(name: str, changed_s: float, now_s: float) -> bool:
    if name.endswith(".bad"):
        return now_s - changed_s > _BAD_AGE_S
    match = _TEMPORARY.match(name)
    if match is None:
        return False
    return now_s - changed_s > _OLD_TEMPORARY_S or not _is_alive(int(match[1]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _read_day(path: Path, day: str) -> int:
    try:
        told = json.loads(files.read_bounded(path, 4096))
        return int(told["bytes"]) if told["day"] == day else 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
