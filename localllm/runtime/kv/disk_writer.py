"""The one thread that writes an engine's blocks to disk, marks them as used, and keeps the folder in bounds.

What goes wrong is counted, never raised: a block that cannot be written is not kept. When writing fails
again and again, it rests for a while, and then tries again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from localllm.models.disk import files
from localllm.runtime.config import TierConfig
from localllm.runtime.kv.blocks import Key
from localllm.runtime.kv.disk_about import leave_about
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX, file_parts, write_file
from localllm.runtime.kv.disk_index import DiskIndex, Found
from localllm.runtime.kv.disk_queue import QUEUE_BYTES, Write, WriteQueue
from localllm.runtime.kv.disk_room import DayBudget, FolderRoom
from localllm.runtime.kv.disk_secret import leave_secret, make_folder

logger = logging.getLogger("localllm.runtime.kv")

LONG_PREFIX_TOKENS = 1024
"""Shorter prefixes are written on their second use only: they are computed again in a moment."""

SPARE_BYTES = 64 << 20
"""What a disk keeps free for others: with less nothing is written."""

_SWEEP_S = 60.0  # between two looks at what lies in the folder, while blocks are written
_IDLE_SWEEP_S = 600.0  # the same while none are
_SWEEP_SHARE = 50  # a look is due, too, once that part of the budget was written: others may write as much
_TOUCH_S = 1.0
_CHAIN_GRAIN_S = 1e-6  # a token's share of a file's time: the front of a sequence counts as used later than its end
_FAILURES = 3  # of writing, one after another, that make it rest
_AT_ONCE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_REST_S, _MOST_REST_S = 30.0, 600.0
_SHARE_OF_A_CORE = 1 / 16  # that writing may take beside those who compute
_MOST_PAUSE_S = 0.25  # after one block
_LAST_WRITE_S = 2.0  # that closing waits for the write at work: a disk may hang


class Writer:
    """Writes the blocks of one engine's folder. Thread safe.

    `about`: what is written down of the engine. `secret`: put back where the folder was deleted.
    """

    def __init__(
        self, folder: Path, index: DiskIndex, config: TierConfig, *, about: Mapping[str, str], secret: bytes
    ) -> None:
        root = Path(config.disk_dir)
        self.day = DayBudget(root, config.disk_daily_bytes)
        self.room = FolderRoom(root, config.disk_bytes, config.disk_age_s)
        self.failure = ""
        self.n_written = self.written_bytes = self.n_dropped = self.n_failed = self.n_changes = 0
        self._root, self._folder, self._index = root, folder, index
        self._about, self._secret = about, secret
        self._sweep_bytes = self.room.limit_bytes // _SWEEP_SHARE
        self._changed = threading.Condition()
        self._queue = WriteQueue()
        self._touched: dict[Key, float] = {}
        self._is_closed = False
        self._give_up_s: float | None = None  # time.monotonic() at which what is left is dropped
        self._rest_until_s, self._rest_s = 0.0, _REST_S
        self._swept_s, self._touched_s = time.monotonic() - _IDLE_SWEEP_S + _SWEEP_S, 0.0
        self._is_prepared = self._has_looked = self._is_asked = False
        self._unswept_bytes = self._n_in_a_row = 0
        self._thread = threading.Thread(target=self._run, name="localllm-kv-write", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def is_resting(self) -> bool:
        """Say whether nothing is written because it failed a moment ago."""
        return time.monotonic() < self._rest_until_s

    def allows(self, write: Write) -> bool:
        """Say whether the day's budget leaves something for a block, as far as it is known what was written."""
        if write.is_pinned:
            return True
        is_long = write.prefix_tokens >= LONG_PREFIX_TOKENS
        return not self.day.is_spent and (write.is_second_use or (is_long and not self.day.is_half_spent))

    def pending(self, key: Key) -> Write | None:
        """Return a block that waits to be written, or is written now."""
        return self._queue.get(key)

    @property
    def waiting_bytes(self) -> int:
        """What waits to be written, or is written now."""
        return self._queue.waiting_bytes

    def put(self, write: Write, *, wait_s: float) -> bool:
        """Have a block written, waiting at most `wait_s` for room in the queue; False = it will not be."""
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: self._queue.has_room(write) or not self._takes, wait_s)
            if not self._takes or not self._queue.has_room(write):
                self.n_dropped += 1
                return False
            self._queue.add(write)
            self.n_changes += 1
            self._changed.notify_all()
            return True

    def unshare(self, keys: Iterable[Key]) -> None:
        """Take note that RAM lets go of blocks that may wait here."""
        with self._changed:
            n_dropped = self._queue.unshare(keys)
            self.n_dropped += n_dropped
            self.n_changes += n_dropped

    def touch(self, keys: Iterable[Key]) -> None:
        """Make blocks the most recently used, soon."""
        now_s = time.time()
        with self._changed:
            if not self._is_closed:
                self._touched.update(dict.fromkeys(keys, now_s))
                self._changed.notify_all()

    def look(self) -> None:
        """Have what lies in the folder counted, soon, if that was not done yet."""
        with self._changed:
            if not self._has_looked:
                self._is_asked = True
                self._changed.notify_all()

    def drop(self, key: Key) -> None:
        """Write a block no more, if it waits. Idempotent."""
        with self._changed:
            self.n_changes += self._queue.drop(key)

    def drop_all(self) -> None:
        """Drop all that waits to be written; what is written now is deleted again."""
        with self._changed:
            self.n_dropped += self._queue.clear()
            self.n_changes += 1
            self._unswept_bytes = self._sweep_bytes + 1  # what lies there is to be counted again

    def close(self, flush_s: float) -> None:
        """End once what waits is written, or `flush_s` have passed. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._give_up_s = time.monotonic() + flush_s
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(flush_s + _LAST_WRITE_S)

    @property
    def _takes(self) -> bool:
        return not self._is_closed and not self.is_resting

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not self._queue and not self._is_chore_due():
                    self._changed.wait(_TOUCH_S if self._touched else _SWEEP_S)
                if self._is_closed and (not self._queue or self._is_late()):
                    break
                write = self._queue.take()
            try:
                self._chores()
            except Exception as error:  # whatever it is, what comes after must still be written
                self._failed(error)
            if write is not None:
                started_s = time.thread_time()
                self._take(write)
                self._rest_after(time.thread_time() - started_s, write)
            del write  # and with it the bytes
        self.drop_all()
        with contextlib.suppress(OSError):
            self._flush_touches()
            self.day.refresh()

    def _rest_after(self, worked_s: float, write: Write) -> None:
        """Leave the cores to those who compute, whom each of their threads waits for, unless somebody waits for us."""
        pause_s = min(_MOST_PAUSE_S, worked_s / _SHARE_OF_A_CORE)
        with self._changed:
            if not write.is_pinned:
                self._changed.wait_for(lambda: self._is_closed or self.waiting_bytes > QUEUE_BYTES, pause_s)

    def _is_late(self) -> bool:
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def _is_chore_due(self) -> bool:
        now_s = time.monotonic()
        is_touch_due = bool(self._touched) and now_s - self._touched_s >= _TOUCH_S
        return is_touch_due or self._is_asked or now_s - self._swept_s > _IDLE_SWEEP_S

    def _chores(self) -> None:
        """Write down what was used, and look at the folder, where that is due. Raises OSError."""
        now_s = time.monotonic()
        if self._touched and now_s - self._touched_s >= _TOUCH_S:
            self._touched_s = now_s
            self._flush_touches()
        if self._is_asked or now_s - self._swept_s > _IDLE_SWEEP_S:
            self._sweep()

    def _take(self, write: Write) -> None:
        """Write a block that waited, unless nobody wants it any more."""
        key = write.block.key
        try:
            if self.pending(key) is write and write.blob is not None:  # else cleared, set aside, or to be pinned
                written = self._write(write, write.blob)
                self._n_in_a_row, self._rest_s, self.failure = 0, _REST_S, ""
                if written is not None and self.pending(key) is not write:
                    self._take_back(written)
        except Exception as error:  # counted before the block stops to wait
            self._failed(error)
        finally:
            with self._changed:
                self.n_changes += 1
                self._queue.done(write)
                self._changed.notify_all()

    def _take_back(self, written: Found) -> None:
        """Delete the file of a block that nobody wants here any more, whatever was forgotten meanwhile.

        Without the condition: whoever needs that must not wait for the disk.
        """
        with contextlib.suppress(OSError):
            written.path.unlink()
            self.room.less(written.n_bytes)
        if self._index.get(written.block.key) is written:
            self._index.drop(written.block.key)

    def _failed(self, error: Exception) -> None:
        """Take note that something could not be written; rest when that is no accident."""
        number, text = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        self.n_failed += 1
        self._n_in_a_row += 1
        self._is_prepared = False
        if self._n_in_a_row < _FAILURES and number not in _AT_ONCE:
            return
        if not self.failure:
            logger.warning("nothing is written to the disk tier for now: %s", text or type(error).__name__)
        self.failure = text or type(error).__name__
        self._rest_until_s = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        self.drop_all()

    def _write(self, write: Write, blob: bytes) -> Found | None:
        """Put a block on disk, whole or not at all; None = it may not lie there. Raises OSError."""
        parts = file_parts(write.block, blob, write.prefix_tokens)
        n_bytes = sum(map(len, parts))
        if not self._is_prepared or not files.is_folder(self._folder):  # somebody may have deleted it
            self._prepare_folder()
        if time.monotonic() - self._swept_s > _SWEEP_S or self._unswept_bytes > self._sweep_bytes:
            self._sweep()
        is_of_use = self.allows(write) and self._follows(write)  # what the day has seen is known since only, maybe
        if not is_of_use or not self._make_room(n_bytes) or not self._follows(write):
            self.n_dropped += 1
            return None
        path = self._index.place(write.block, is_pinned=write.is_pinned)
        used_s = time.time()
        try:
            self._put(path, parts, used_s - write.block.start * _CHAIN_GRAIN_S)
        except FileNotFoundError:  # deleted in this moment
            self._prepare_folder()
            self._put(path, parts, used_s - write.block.start * _CHAIN_GRAIN_S)
        if write.is_pinned:
            with contextlib.suppress(OSError):
                path.with_name(path.name.removesuffix(PINNED_SUFFIX) + SUFFIX).unlink()
        written = Found(write.block, path, n_bytes, write.prefix_tokens)
        self._index.add(written)
        self.room.used_bytes += n_bytes
        self._unswept_bytes += n_bytes
        self.n_written += 1
        self.written_bytes += n_bytes
        self.day.spend(n_bytes)
        with self._changed:
            self._touched.setdefault(write.block.parent, used_s)
        return written

    def _follows(self, write: Write) -> bool:
        """Say whether a block's parent lies here: without it, for which there was no room, it is of no use."""
        return not write.block.start or self._index.get(write.block.parent) is not None

    def _put(self, path: Path, parts: tuple[bytes, ...], used_s: float) -> None:
        files.make_own_folder(path.parent)
        write_file(path, parts, used_s)

    def _make_room(self, n_bytes: int) -> bool:
        """Make room for a file within the budget; False = there is none. Raises OSError when the disk is full."""
        if not self.room.fits(n_bytes):
            self._flush_touches()  # so that nothing goes before what follows it
            is_made = self.room.make_room(n_bytes)
            self._index.refresh()
            if not is_made:
                return False
        facts = os.statvfs(self._folder)
        if facts.f_bavail * facts.f_frsize < n_bytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, "the disk is almost full")
        return True

    def _prepare_folder(self) -> None:
        """Make the folder what it should be. Raises OSError."""
        make_folder(self._root)
        leave_secret(self._root, self._secret)
        files.make_own_folder(self._folder)
        leave_about(self._folder, self._about)
        self._sweep()
        self._is_prepared = True

    def _sweep(self) -> None:
        """Count what lies in the folder, all processes' files, and delete what may not. Raises OSError."""
        self._swept_s, self._unswept_bytes = time.monotonic(), 0
        self._has_looked, self._is_asked = True, False
        self._flush_touches()
        self.room.sweep()
        self._index.refresh()
        self.day.refresh()

    def _flush_touches(self) -> None:
        """Write down when blocks were used: they, and all that comes before them."""
        with self._changed:
            touched, self._touched = self._touched, {}
        times = dict[Key, float]()
        for key, now_s in sorted(touched.items(), key=lambda item: -item[1]):
            found = self._index.get(key)
            while found is not None and found.block.key not in times:
                times[found.block.key] = now_s
                used_s = now_s - found.block.start * _CHAIN_GRAIN_S
                with contextlib.suppress(OSError):
                    os.utime(found.path, (used_s, used_s), follow_symlinks=False)
                found = self._index.get(found.block.parent)
