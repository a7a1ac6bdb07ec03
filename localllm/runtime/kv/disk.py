"""The disk tier: blocks as files in a folder that survives the process and is shared by all of a user's.

No call here raises for what the disk does: what cannot be written is not kept, what cannot be read is
computed. Files are written by one background thread, whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.models.disk import files
from localllm.runtime.config import TierConfig
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX, BadFile, file_parts, read_file
from localllm.runtime.kv.disk_index import DiskIndex, Found
from localllm.runtime.kv.disk_room import DayBudget, FolderRoom, temporary_name

logger = logging.getLogger("localllm.runtime.kv")

SECRET_BYTES = 32
LONG_PREFIX_TOKENS = 1024
"""Shorter prefixes are written on their second use only: they are computed again in a moment."""

_QUEUE_BYTES = 256 << 20
_SWEEP_S = 60.0
_CHAIN_GRAIN_S = 1e-6  # a token's share of a file's time: the front of a sequence counts as used later than its end
_FAILURES = 3  # of writing, one after another, that end it


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Gauges and counters of a disk tier; counters are of this process."""

    folder: str
    limit_bytes: int
    used_bytes: int
    n_written: int
    written_bytes: int
    n_read: int
    n_bad: int
    n_evicted: int
    n_dropped: int
    spent_today_bytes: int
    daily_bytes: int
    waiting_bytes: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Write:
    block: Block
    blob: bytes
    prefix_tokens: int
    is_pinned: bool


class DiskTier:
    """The folder of one engine's blocks in the user's folder of all engines. Thread safe."""

    def __init__(self, config: TierConfig, *, fingerprint: str, model_name: str) -> None:
        self._root = Path(config.disk_dir)
        self._folder = self._root / hashlib.blake2b(fingerprint.encode(), digest_size=12).hexdigest()
        self._about = {"model": model_name, "fingerprint": fingerprint}
        self._index = DiskIndex(self._folder)
        self._day = DayBudget(self._root, config.disk_daily_bytes)
        self._room = FolderRoom(self._root, config.disk_bytes, config.disk_age_s)
        self._config = config
        self._changed = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._pending: dict[Key, _Write] = {}
        self._touched: dict[Key, float] = {}
        self._waiting_bytes = 0
        self._is_closed = False
        self._give_up_s: float | None = None  # time.monotonic() at which what is left is dropped
        self._failure = ""
        self._n_changes = 0  # of what waits to be written
        self._n_written = self._written_bytes = self._n_read = self._n_dropped = 0
        self.secret = self._open()
        self._thread = threading.Thread(target=self._run, name="localllm-kv-write", daemon=True)
        self._thread.start()

    def children(self, parent: Key) -> Sequence[Block]:
        """Return the blocks that follow `parent`."""
        return [found.block for found in self._index.children(parent)]

    @property
    def version(self) -> int:
        """A number that changes with what is known to lie here."""
        return self._n_changes + self._index.version

    def find(self, parent: Key, key: Key) -> Block | None:
        """Return one block that follows `parent`, looking at no other file."""
        waiting = self._pending.get(key)
        if waiting is not None:
            return waiting.block
        found = self._index.find(parent, key)
        return None if found is None else found.block

    def known(self, key: Key) -> Block | None:
        """Return a block that lies here, or will in a moment, as far as is known without asking the disk."""
        waiting = self._pending.get(key)
        if waiting is not None:
            return waiting.block
        found = self._index.get(key)
        return None if found is None else found.block

    def holds(self, key: Key) -> bool:
        """Say whether a block lies here, or will in a moment, as far as is known without asking the disk."""
        return self.known(key) is not None

    def read(self, block: Block) -> bytes | None:
        """Return a block's verified bytes; None = they are gone, or were wrong and are set aside."""
        waiting = self._pending.get(block.key)
        if waiting is not None:
            return waiting.blob
        found = self._index.get(block.key)
        for path in self._paths(block, found):
            try:
                header, blob = read_file(path)
                if header.block != block:
                    raise BadFile("another block")
            except FileNotFoundError:
                continue
            except (BadFile, OSError) as error:
                self._aside(path, error)
                continue
            self._n_read += 1
            return blob
        self._index.drop(block.key)
        return None

    def write(
        self,
        block: Block,
        blob: bytes,
        *,
        prefix_tokens: int,
        is_second_use: bool,
        is_pinned: bool = False,
        wait_s: float = 0.0,
    ) -> bool:
        """Have a block written if the rules allow it; say whether it lies here, or soon will.

        `wait_s`: at most that long for room in the queue.
        """
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: self._has_room(blob) or self._is_closed or self._failure, wait_s)
            found = self._index.get(block.key)
            waiting = self._pending.get(block.key)
            if any(one is not None and (one.is_pinned or not is_pinned) for one in (waiting, found)):
                return True
            if self._is_closed or self._failure or not self._may_write(prefix_tokens, is_second_use, is_pinned):
                return False
            if not self._has_room(blob):
                self._n_dropped += 1
                return False
            write = _Write(block, blob, prefix_tokens, is_pinned)
            self._pending[block.key] = write
            self._n_changes += 1
            self._writes.append(write)
            self._waiting_bytes += len(blob)
            self._changed.notify_all()
            return True

    def used(self, keys: Sequence[Key]) -> None:
        """Make blocks the most recently used."""
        now_s = time.time()
        with self._changed:
            self._touched.update(dict.fromkeys(keys, now_s))
            self._changed.notify_all()

    def used_s(self, key: Key) -> float | None:
        """Return when a block was last used (Unix seconds), as far as is written down; None where it is not."""
        found = self._index.get(key)
        if found is not None:
            with contextlib.suppress(OSError):
                return os.lstat(found.path).st_mtime
        return None

    def set_aside(self, key: Key) -> None:
        """Set aside the file of a block whose bytes are of no use."""
        with self._changed:
            self._n_changes += self._pending.pop(key, None) is not None
        found = self._index.get(key)
        if found is not None:
            self._aside(found.path, None)
            self._index.drop(key)

    def clear(self) -> tuple[int, int]:
        """Delete this engine's files, those that are pinned too; return how many, and their bytes."""
        with self._changed:
            self._forget_waiting()
        n_files = n_bytes = 0
        for found in self._index.all():
            with contextlib.suppress(OSError):
                found.path.unlink()
                n_files, n_bytes = n_files + 1, n_bytes + found.n_bytes
        self._index.forget_all()
        self._room.used_bytes = max(0, self._room.used_bytes - n_bytes)
        return n_files, n_bytes

    def stats(self) -> DiskStats:
        """Return what is known of the folder, without looking."""
        return DiskStats(
            folder=str(self._root),
            limit_bytes=self._config.disk_bytes,
            used_bytes=self._room.used_bytes,
            n_written=self._n_written,
            written_bytes=self._written_bytes,
            n_read=self._n_read,
            n_bad=self._index.n_bad,
            n_evicted=self._room.n_evicted,
            n_dropped=self._n_dropped,
            spent_today_bytes=self._day.spent_bytes,
            daily_bytes=self._config.disk_daily_bytes,
            waiting_bytes=self._waiting_bytes,
            failure=self._failure,
        )

    def close(self, *, flush_s: float) -> None:
        """End the writer once what waits is written, or `flush_s` have passed. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._give_up_s = time.monotonic() + flush_s
            self._changed.notify_all()
        self._thread.join()

    def _has_room(self, blob: bytes) -> bool:
        return self._waiting_bytes + len(blob) <= _QUEUE_BYTES

    def _may_write(self, prefix_tokens: int, is_second_use: bool, is_pinned: bool) -> bool:
        if is_pinned:
            return True
        if self._day.is_spent:
            return False
        return is_second_use or (prefix_tokens >= LONG_PREFIX_TOKENS and not self._day.is_half_spent)

    def _open(self) -> bytes:
        """Return the user's secret, made where there is none; the folder must be the user's own."""
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            facts = os.lstat(self._root)
            if not files.is_folder(self._root) or facts.st_uid != os.getuid():
                raise OSError(f"{self._root} is not a folder of this user")
            if facts.st_mode & 0o022:
                raise OSError(f"{self._root} can be written by others")
            return _secret(self._root / "secret")
        except OSError as error:
            self._fail(error)
            return os.urandom(SECRET_BYTES)

    def _fail(self, error: OSError) -> None:
        """Write no more; what lies there can still be read."""
        self._failure = error.strerror or str(error)
        logger.warning("the disk tier is off: %s", self._failure)

    def _paths(self, block: Block, found: Found | None) -> list[Path]:
        if found is not None:
            return [found.path, self._index.place(block, is_pinned=not found.is_pinned)]
        return [self._index.place(block, is_pinned=pinned) for pinned in (False, True)]

    def _aside(self, path: Path, error: Exception | None) -> None:
        self._index.n_bad += 1
        files.set_aside(path)
        logger.warning("a file of the disk tier was set aside: %s", error or "the engine refused its bytes")

    # --- the writer's thread

    def _run(self) -> None:
        n_failed, swept_s = 0, -_SWEEP_S
        while True:
            with self._changed:
                while not self._writes and not self._touched and not self._is_closed:
                    self._changed.wait()
                if self._is_closed and (not self._writes or self._is_late()):
                    self._forget_waiting()
                    break
                touched, self._touched = self._touched, {}
                write = self._writes.popleft() if self._writes else None
            self._touch(touched)
            if write is None:
                continue
            is_wanted = self._pending.get(write.block.key) is write  # else cleared, set aside, or to be pinned
            try:
                if not is_wanted:
                    continue
                if time.monotonic() - swept_s > _SWEEP_S:
                    swept_s = time.monotonic()
                    self._prepare_folder()
                self._write(write)
                n_failed = 0
            except OSError as error:
                n_failed += 1
                self._n_dropped += 1
                if n_failed >= _FAILURES:
                    self._fail(error)
                swept_s = -_SWEEP_S
            finally:
                self._done(write, was_at_work=is_wanted)
        with contextlib.suppress(OSError):
            self._touch(self._touched)
            if self._n_written:
                self._day.refresh()

    def _is_late(self) -> bool:
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def _forget_waiting(self) -> None:
        """Drop what waits to be written. Called under the condition."""
        self._n_dropped += len(self._writes)
        self._waiting_bytes -= sum(len(write.blob) for write in self._writes)
        self._writes.clear()
        self._pending.clear()
        self._n_changes += 1

    def _done(self, write: _Write, *, was_at_work: bool) -> None:
        """Take note that a block waits no more; what was cleared while it was written goes again."""
        with self._changed:
            self._n_changes += 1
            self._waiting_bytes -= len(write.blob)
            if self._pending.get(write.block.key) is write:
                del self._pending[write.block.key]
            elif was_at_work:
                self._take_back(write)
            self._changed.notify_all()

    def _take_back(self, write: _Write) -> None:
        """Delete the file of a block that nobody wants here any more."""
        found = self._index.get(write.block.key)
        if found is not None and found.is_pinned == write.is_pinned:
            self._index.drop(write.block.key)
            with contextlib.suppress(OSError):
                found.path.unlink()
                self._room.used_bytes -= found.n_bytes

    def _prepare_folder(self) -> None:
        """Make the folder what it should be, and keep it within its budget and its age. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = self._folder / "about.json"
        if not about.exists():
            files.write_atomic(about, json.dumps(self._about).encode(), mode=0o600)
        self._day.refresh()
        self._room.sweep()

    def _write(self, write: _Write) -> None:
        """Put a block on disk, whole or not at all. Raises OSError."""
        parts = file_parts(write.block, write.blob, write.prefix_tokens)
        n_bytes = sum(map(len, parts))
        if not self._room.make_room(n_bytes):
            self._n_dropped += 1
            return
        path = self._index.place(write.block, is_pinned=write.is_pinned)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        temporary = path.with_name(temporary_name())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.OWN, 0o600)
        try:
            try:
                for part in parts:
                    files.write_all(fd, part)
                os.fsync(fd)
                used_s = time.time() - write.block.start * _CHAIN_GRAIN_S
                os.utime(fd, (used_s, used_s))
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if write.is_pinned:
            with contextlib.suppress(OSError):
                path.with_name(path.name.removesuffix(PINNED_SUFFIX) + SUFFIX).unlink()
        self._index.add(Found(write.block, path, n_bytes, write.prefix_tokens))
        self._room.used_bytes += n_bytes
        self._n_written += 1
        self._written_bytes += n_bytes
        self._day.spend(n_bytes)

    def _touch(self, touched: dict[Key, float]) -> None:
        for key, now_s in touched.items():
            found = self._index.get(key)
            if found is not None:
                used_s = now_s - found.block.start * _CHAIN_GRAIN_S
                with contextlib.suppress(OSError):
                    os.utime(found.path, (used_s, used_s), follow_symlinks=False)


def _secret(path: Path) -> bytes:
    """Return the secret in a file, made by whoever comes first. Raises OSError."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            secret = files.read_bounded(path, SECRET_BYTES)
            if len(secret) == SECRET_BYTES:
                return secret
            files.set_aside(path)
        temporary = path.with_name(temporary_name())
        files.write_atomic(temporary, os.urandom(SECRET_BYTES), mode=0o600)
        try:
            os.link(temporary, path)  # fails where another process was first
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    return files.read_bounded(path, SECRET_BYTES)
