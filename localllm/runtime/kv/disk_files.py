"""What writing a block does on disk: its folder is made and kept in bounds, room is made, and the file is put there."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path

from localllm.models.disk import files
from localllm.runtime.config import TierConfig
from localllm.runtime.kv.disk_about import leave_about
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX, file_parts, write_file
from localllm.runtime.kv.disk_index import DiskIndex, Found
from localllm.runtime.kv.disk_queue import Write
from localllm.runtime.kv.disk_room import DayBudget, FolderRoom
from localllm.runtime.kv.disk_secret import leave_secret, make_folder
from localllm.runtime.kv.disk_uses import Uses, file_time

LONG_PREFIX_TOKENS = 1024
"""Shorter prefixes are written on their second use only: they are computed again in a moment."""

SPARE_BYTES = 64 << 20
"""What always stays free on a disk, for others: with less nothing is written."""

SWEEP_S = 60.0
"""Between two looks at what lies in the folder, while blocks are written."""

_IDLE_SWEEP_S = 600.0  # the same while none are
_SWEEP_SHARE = 50  # a look is due, too, once that part of the budget was written: others may write as much


class BlockFiles:
    """The files of one engine's blocks, as the thread changes them that writes; `allows` is for any thread.

    `about`: what is written down of the engine. `secret`: put back where the folder was deleted.
    """

    def __init__(
        self, folder: Path, index: DiskIndex, config: TierConfig, *, about: Mapping[str, str], secret: bytes
    ) -> None:
        root = Path(config.disk_dir)
        self.day = DayBudget(root, config.disk_daily_bytes)
        self.room = FolderRoom(root, config.disk_bytes, config.disk_age_s)
        self.uses = Uses(index)
        self.has_looked = False  # what lies in the folder was counted
        self.root, self._folder, self._index = root, folder, index
        self._about, self._secret = about, secret
        self._sweep_bytes = self.room.limit_bytes // _SWEEP_SHARE
        self._swept_s = time.monotonic() - _IDLE_SWEEP_S + SWEEP_S
        self._is_prepared = self._is_asked = False
        self._unswept_bytes = 0

    def allows(self, write: Write) -> bool:
        """Say whether the day's budget leaves something for a block, as far as it is known what was written."""
        if write.is_pinned:
            return True
        is_long = write.prefix_tokens >= LONG_PREFIX_TOKENS
        return not self.day.is_spent and (write.is_second_use or (is_long and not self.day.is_half_spent))

    @property
    def is_sweep_due(self) -> bool:
        """Say whether to look at the folder though nothing is written."""
        return self._is_asked or time.monotonic() - self._swept_s > _IDLE_SWEEP_S

    def look_soon(self) -> None:
        """Have what lies in the folder counted with the next `sweep_due`."""
        self._is_asked = True

    def count_anew(self) -> None:
        """Have what lies in the folder counted before the next block is written."""
        self._unswept_bytes = self._sweep_bytes + 1

    def prepare_anew(self) -> None:
        """Have the folder made what it should be before the next block is written."""
        self._is_prepared = False

    def sweep_due(self) -> None:
        """Look at the folder, where that is due. Raises OSError."""
        if self.is_sweep_due:
            self._sweep()

    def write(self, write: Write, blob: bytes) -> Found | None:
        """Put a block on disk, whole or not at all; None = it may not lie there. Raises OSError."""
        parts = file_parts(write.block, blob, write.prefix_tokens)
        n_bytes = sum(map(len, parts))
        if not self._is_prepared or not files.is_folder(self._folder):  # somebody may have deleted it
            self._prepare_folder()
        if time.monotonic() - self._swept_s > SWEEP_S or self._unswept_bytes > self._sweep_bytes:
            self._sweep()
        is_of_use = self.allows(write) and self._follows(write)  # what the day has seen is known since only, maybe
        if not is_of_use or not self._make_room(n_bytes) or not self._follows(write):
            return None
        path = self._index.place(write.block, is_pinned=write.is_pinned)
        used_s = time.time()
        try:
            self._put(path, parts, file_time(write.block, used_s))
        except FileNotFoundError:  # deleted in this moment
            self._prepare_folder()
            self._put(path, parts, file_time(write.block, used_s))
        if write.is_pinned:
            with contextlib.suppress(OSError):
                path.with_name(path.name.removesuffix(PINNED_SUFFIX) + SUFFIX).unlink()
        written = Found(write.block, path, n_bytes, write.prefix_tokens)
        self._index.add(written)
        self.room.used_bytes += n_bytes
        self._unswept_bytes += n_bytes
        self.day.spend(n_bytes)
        self.uses.add_unless_later(write.block.parent, used_s)
        return written

    def take_back(self, written: Found) -> None:
        """Delete the file of a block that nobody wants here any more, whatever was forgotten meanwhile."""
        with contextlib.suppress(OSError):
            written.path.unlink()
            self.room.less(written.n_bytes)
        if self._index.get(written.block.key) is written:
            self._index.drop(written.block.key)

    def _follows(self, write: Write) -> bool:
        """Say whether a block's parent lies here: without it, for which there was no room, it is of no use."""
        return not write.block.start or self._index.get(write.block.parent) is not None

    def _put(self, path: Path, parts: tuple[bytes, ...], used_s: float) -> None:
        files.make_own_folder(path.parent)
        write_file(path, parts, used_s)

    def _make_room(self, n_bytes: int) -> bool:
        """Make room for a file within the budget; False = there is none. Raises OSError when the disk is full."""
        if not self.room.fits(n_bytes):
            self.uses.write_down()  # so that nothing goes before what follows it
            is_made = self.room.make_room(n_bytes)
            self._index.refresh()
            if not is_made:
                return False
        facts = os.statvfs(self._folder)
        free_bytes = facts.f_bavail * facts.f_frsize
        if free_bytes < n_bytes + SPARE_BYTES:
            told = f"{free_bytes / 1e6:.0f} MB are free there, and {SPARE_BYTES / 1e6:.0f} MB always stay free"
            raise OSError(errno.ENOSPC, told)
        return True

    def _prepare_folder(self) -> None:
        """Make the folder what it should be. Raises OSError."""
        make_folder(self.root)
        leave_secret(self.root, self._secret)
        files.make_own_folder(self._folder)
        leave_about(self._folder, self._about)
        self._sweep()
        self._is_prepared = True

    def _sweep(self) -> None:
        """Count what lies in the folder, all processes' files, and delete what may not. Raises OSError."""
        self._swept_s, self._unswept_bytes = time.monotonic(), 0
        self.has_looked, self._is_asked = True, False
        self.uses.write_down()
        self.room.sweep()
        self._index.refresh()
        self.day.refresh()
