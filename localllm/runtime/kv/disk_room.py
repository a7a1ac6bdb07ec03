"""How much may lie in the folder and be written a day, counted over all processes that share it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.models.disk import files, lock
from localllm.runtime.kv.disk_format import is_partial_left_behind
from localllm.runtime.kv.disk_names import file_kind, is_engine_folder, is_part

_OLD_TEMPORARY_S = 3600.0
_AHEAD_S = 60.0  # of the clock, is a clock that was set back
_LEFT_SHARE = 0.95  # of the budget, once something had to go: so not for every block anew
_COUNT_BYTES = 16 << 20  # are written between two looks into the day's file
_FREE_SHARE = 10
_BAD_AGE_S = 86_400.0
_AGED_SHARE = 4  # of the blocks, at most, that a sweep deletes for their age: the clock may be wrong today
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class _Seen:
    path: Path
    n_bytes: int
    used_s: float
    is_pinned: bool = False
    is_bad: bool = False


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
        """Add what was written here to the day's file, and learn what others wrote. Raises OSError.

        Where the file system has no locks, each process counts for itself.
        """
        day = _today()
        if self._day != day:
            self._day, self._told_bytes, self._own_bytes = day, 0, 0
        if not files.is_folder(self._folder):
            return
        try:
            with contextlib.suppress(lock.Busy), lock.hold(self._folder / "daily.lock", on_wait=None):
                self._exchange(day)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _exchange(self, day: str) -> None:
        """Read the day's file, and write it anew where it lacks something. Called under its lock. Raises OSError."""
        told_day, told_bytes = _read_day(self._folder / "daily.json", day)
        self._told_bytes = told_bytes + self._own_bytes
        if self._own_bytes or told_day > day:  # a later day, or it would count until that has passed
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


def spent_today(folder: Path) -> int:
    """Return the bytes that were written today, as far as processes have told yet."""
    return _read_day(folder / "daily.json", _today())[1]


class FolderRoom:
    """Keeps the folder within its budget and its age. Used by the writer's thread alone."""

    def __init__(self, folder: Path, limit_bytes: int | None, age_s: float) -> None:
        """`limit_bytes` None: a tenth of what would be free without what lies here, found out at every sweep."""
        self._folder = folder
        self._is_auto = limit_bytes is None
        self._age_s = age_s
        self.used_bytes = 0
        self.limit_bytes = _free_bytes(folder) // _FREE_SHARE if limit_bytes is None else limit_bytes
        self.n_evicted = 0
        self._pinned_bytes = 0

    def fits(self, n_bytes: int) -> bool:
        """Say whether a file fits, as far as it is known what lies there."""
        return self.used_bytes + n_bytes <= self.limit_bytes

    def less(self, n_bytes: int) -> None:
        """Count files no more that others than a sweep deleted; the next sweep counts all anew."""
        self.used_bytes = max(0, self.used_bytes - n_bytes)

    def sweep(self, need_bytes: int = 0) -> None:
        """Count what lies there; delete what is too old, half-written or over the budget, least recently used first."""
        now_s = time.time()
        seen = _in_the_past(list(_files(self._folder, now_s)), now_s)
        aged = self._aged(seen, now_s)
        for one in aged:
            self._delete(one)
        seen = [one for one in seen if one not in aged]
        self.used_bytes = sum(one.n_bytes for one in seen)
        self._pinned_bytes = sum(one.n_bytes for one in seen if one.is_pinned)
        if self._is_auto:
            self.limit_bytes = (_free_bytes(self._folder) + self.used_bytes) // _FREE_SHARE
        if self.fits(need_bytes) or not self._can_fit(need_bytes):
            return
        target_bytes = max(self._pinned_bytes, int(self.limit_bytes * _LEFT_SHARE) - need_bytes)
        for one in sorted((one for one in seen if not one.is_pinned), key=lambda one: (not one.is_bad, one.used_s)):
            if self.used_bytes <= target_bytes:
                break
            self._delete(one)
            self.used_bytes -= one.n_bytes

    def _aged(self, seen: list[_Seen], now_s: float) -> set[_Seen]:
        """Return what goes for its age: bad files, and of the blocks a share, so that no one look may cost them all."""
        bad = {one for one in seen if one.is_bad and now_s - one.used_s > _BAD_AGE_S}
        blocks = sorted((one for one in seen if not one.is_bad and not one.is_pinned), key=lambda one: one.used_s)
        n_most = -(-len(blocks) // _AGED_SHARE)
        return bad | {one for one in blocks[:n_most] if now_s - one.used_s > self._age_s}

    def make_room(self, n_bytes: int) -> bool:
        """Make room for a file; False = there is none to be had."""
        if not self.fits(n_bytes) and self._can_fit(n_bytes):
            self.sweep(n_bytes)
        return self.fits(n_bytes)

    def _can_fit(self, n_bytes: int) -> bool:
        return self._pinned_bytes + n_bytes <= self.limit_bytes

    def _delete(self, one: _Seen) -> None:
        with contextlib.suppress(OSError):
            one.path.unlink()
            self.n_evicted += not one.is_bad


def survey(folder: Path) -> Iterator[tuple[Path, int, float, bool]]:
    """Yield every block file below a folder: path, bytes, when it was last used (Unix seconds), whether pinned."""
    now_s = time.time()
    for one in _files(folder, None):
        if not one.is_bad:
            yield one.path, one.n_bytes, min(one.used_s, now_s), one.is_pinned


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted. `n_left`: files that could not be."""

    n_blocks: int = 0
    n_bytes: int = 0
    n_left: int = 0


def delete_blocks(folder: Path) -> Deleted:
    """Delete an engine's block files, pinned ones and bad ones too."""
    n_deleted = n_bytes = n_left = 0
    for one in _in_engine(folder, None):
        try:
            one.path.unlink()
            n_deleted, n_bytes = n_deleted + 1, n_bytes + one.n_bytes
        except FileNotFoundError:
            pass
        except OSError:
            n_left += 1
    return Deleted(n_deleted, n_bytes, n_left)


def engine_folders(folder: Path) -> list[Path]:
    """Return the folders of all engines."""
    return [path for path in _folders(folder) if is_engine_folder(path.name)]


def _files(folder: Path, sweep_s: float | None) -> Iterator[_Seen]:
    """Yield the files of all engines; with `sweep_s` (now), what writers that died left behind is deleted."""
    _sweep_temporary(_entries(folder) if sweep_s is not None else [], sweep_s or 0.0)
    for engine in engine_folders(folder):
        yield from _in_engine(engine, sweep_s)


def _in_engine(engine: Path, sweep_s: float | None) -> Iterator[_Seen]:
    for folder in (engine, *(path for path in _folders(engine) if is_part(path.name))):
        entries = _entries(folder)
        for entry in entries if folder is not engine else []:
            kind = file_kind(entry.name)
            if kind in ("block", "pinned", "bad"):
                with contextlib.suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode):
                        path = Path(entry.path)
                        yield _Seen(path, facts.st_size, facts.st_mtime, kind == "pinned", kind == "bad")
        if sweep_s is not None:
            _sweep_temporary(entries, sweep_s)


def _free_bytes(folder: Path) -> int:
    """Return the free bytes where a folder is or would be made; 0 where that cannot be told."""
    while not os.path.exists(folder) and folder != folder.parent:  # a path's own `exists` raises
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _sweep_temporary(entries: list[os.DirEntry[str]], now_s: float) -> None:
    """Delete the temporary files that nobody writes any more."""
    for entry in entries:
        kind = file_kind(entry.name)
        if kind in ("partial", "temporary"):
            with contextlib.suppress(OSError):
                is_left = is_partial_left_behind(Path(entry.path)) if kind == "partial" else None
                age_s = abs(now_s - entry.stat(follow_symlinks=False).st_mtime)
                if is_left or (is_left is None and age_s > _OLD_TEMPORARY_S):
                    os.unlink(entry.path)


def _in_the_past(seen: list[_Seen], now_s: float) -> list[_Seen]:
    """Return files as they would be dated by today's clock: one that was set back makes nothing younger for ever."""
    ahead = [one for one in seen if one.used_s > now_s + _AHEAD_S]
    if not ahead:
        return seen
    shift_s = max(one.used_s for one in ahead) - now_s
    for one in ahead:
        with contextlib.suppress(OSError):
            os.utime(one.path, (one.used_s - shift_s, one.used_s - shift_s), follow_symlinks=False)
    return [replace(one, used_s=one.used_s - shift_s) if one.used_s > now_s + _AHEAD_S else one for one in seen]


def _folders(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder and is a folder, no link to one."""
    for entry in _entries(folder):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _read_day(path: Path, day: str) -> tuple[str, int]:
    """Return the day that was written down last, and what was written today.

    A later day's count is today's, for the clock was set back since.
    """
    try:
        told = json.loads(files.read_bounded(path, 4096))
        told_day, n_bytes = str(told["day"]), max(0, int(told["bytes"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "", 0
    return told_day, n_bytes if told_day >= day else 0
