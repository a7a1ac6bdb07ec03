"""The one thread that writes an engine's blocks to disk, marks them as used, and keeps the folder in bounds.

What goes wrong is counted, never raised: a block that cannot be written is not kept. When writing fails
again and again, it rests for a while, and then tries again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterable

from localllm.runtime.kv.blocks import Key
from localllm.runtime.kv.disk_files import SWEEP_S, BlockFiles
from localllm.runtime.kv.disk_folder import trouble_with
from localllm.runtime.kv.disk_index import Found
from localllm.runtime.kv.disk_queue import QUEUE_BYTES, Write, WriteQueue
from localllm.runtime.kv.disk_uses import WRITE_DOWN_EVERY_S

logger = logging.getLogger("localllm.runtime.kv")

_FAILURES = 3  # of writing, one after another, that make it rest
_AT_ONCE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_REST_S, _MOST_REST_S = 30.0, 600.0
_SHARE_OF_A_CORE = 1 / 16  # that writing may take beside those who compute
_MOST_PAUSE_S = 0.25  # after one block
_LAST_WRITE_S = 2.0  # that closing waits for the write at work: a disk may hang


class Writer:
    """Writes blocks in the order in which they came. Thread safe; only its own thread touches the disk."""

    def __init__(self, files: BlockFiles) -> None:
        self.files = files
        self.failure = ""
        self.n_written = self.written_bytes = self.n_dropped = self.n_failed = self.n_changes = 0
        self._changed = threading.Condition()
        self._queue = WriteQueue()
        self._is_closed = False
        self._give_up_s: float | None = None  # time.monotonic() at which what is left is dropped
        self._rest_until_s, self._rest_s = 0.0, _REST_S
        self._n_in_a_row = 0
        self._is_told = False  # of failures, since something was written
        self._thread = threading.Thread(target=self._run, name="localllm-kv-write", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def is_resting(self) -> bool:
        """Say whether nothing is written because it failed a moment ago."""
        return time.monotonic() < self._rest_until_s

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
                self.files.uses.add(keys, now_s)
                self._changed.notify_all()

    def look(self) -> None:
        """Have what lies in the folder counted, soon, if that was not done yet."""
        with self._changed:
            if not self.files.has_looked:
                self.files.look_soon()
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
            self.files.count_anew()

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
                    self._changed.wait(WRITE_DOWN_EVERY_S if self.files.uses else SWEEP_S)
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
            self.files.uses.write_down()
            self.files.day.refresh()

    def _rest_after(self, worked_s: float, write: Write) -> None:
        """Leave the cores to those who compute, whom each of their threads waits for, unless somebody waits for us."""
        pause_s = min(_MOST_PAUSE_S, worked_s / _SHARE_OF_A_CORE)
        with self._changed:
            if not write.is_pinned:
                self._changed.wait_for(lambda: self._is_closed or self.waiting_bytes > QUEUE_BYTES, pause_s)

    def _is_late(self) -> bool:
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def _is_chore_due(self) -> bool:
        return self.files.uses.is_due or self.files.is_sweep_due

    def _chores(self) -> None:
        """Write down what was used, and look at the folder, where that is due. Raises OSError."""
        self.files.uses.write_down_due()
        self.files.sweep_due()

    def _take(self, write: Write) -> None:
        """Write a block that waited, unless nobody wants it any more."""
        key = write.block.key
        try:
            if self.pending(key) is write and write.blob is not None:  # else cleared, set aside, or to be pinned
                written = self.files.write(write, write.blob)
                if written is None:
                    self.n_dropped += 1
                else:
                    self._succeeded(written)
                    if self.pending(key) is not write:  # without the condition: nobody must wait for the disk
                        self.files.take_back(written)
        except Exception as error:  # counted before the block stops to wait
            self._failed(error)
        finally:
            with self._changed:
                self.n_changes += 1
                self._queue.done(write)
                self._changed.notify_all()

    def _succeeded(self, written: Found) -> None:
        self._n_in_a_row, self._rest_s, self.failure, self._is_told = 0, _REST_S, "", False
        self.n_written += 1
        self.written_bytes += written.n_bytes

    def _failed(self, error: Exception) -> None:
        """Take note that something could not be written, and tell it once; rest when that is no accident."""
        number, text = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        why = text or type(error).__name__
        self.n_failed += 1
        self._n_in_a_row += 1
        self.files.prepare_anew()
        if not self._is_told:
            told = trouble_with(self.files.root) or f"{self.files.root}: {why}"
            logger.warning("what is kept of prompts could not be written to disk: %s", told)
            self._is_told = True
        if self._n_in_a_row < _FAILURES and number not in _AT_ONCE:
            return
        self.failure = why
        self._rest_until_s = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _MOST_REST_S)
        self.drop_all()
