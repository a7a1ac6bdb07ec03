"""The disk tier: blocks as files in a folder that survives the process and is shared by all of a user's.

No call here raises for what the disk does: what cannot be written is not kept, what cannot be read is
computed. One background thread writes (`disk_writer.py`) what becomes files, whole or not at all (`disk_files.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.models.available import available_bytes
from localllm.models.disk import files
from localllm.runtime.config import TierConfig
from localllm.runtime.kv.asking import ask_once
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_files import BlockFiles
from localllm.runtime.kv.disk_folder import Trouble, trouble_of, trouble_with
from localllm.runtime.kv.disk_format import VERSION, BadFile, NewerFile, read_file
from localllm.runtime.kv.disk_index import DiskIndex
from localllm.runtime.kv.disk_names import ENGINE_BYTES
from localllm.runtime.kv.disk_queue import Write
from localllm.runtime.kv.disk_room import Deleted, delete_blocks
from localllm.runtime.kv.disk_secret import SECRET_BYTES, open_folder
from localllm.runtime.kv.disk_writer import Writer

logger = logging.getLogger("localllm.runtime.kv")

_OPEN_S = 5.0  # that a model's loading waits for the folder; then it does without
_SMALL_BYTES = 64 << 20  # are read without a look at how much memory there is


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Gauges and counters of a disk tier; counters are of this process.

    `used_bytes`: in the folder, of all engines, as it was when somebody last looked; 0 until then.
    `n_dropped`: blocks not written for want of time or room; `n_failed`: those that the disk did not take.
    `failure`: why nothing is written at present, "" where all is well.
    """

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
    n_failed: int = 0


class DiskTier:
    """The folder of one engine's blocks in the user's folder of all engines. Thread safe.

    `secret`: what keys are made with, the same in all processes that share the folder.
    """

    def __init__(self, config: TierConfig, *, fingerprint: str, model_name: str) -> None:
        self._config = config
        self._n_read = 0
        name = hashlib.blake2b(f"{VERSION} {fingerprint}".encode(), digest_size=ENGINE_BYTES).hexdigest()
        self._folder = Path(config.disk_dir) / name
        self._index = DiskIndex(self._folder)
        self._refusal = ""
        self._about = {"model": model_name, "fingerprint": fingerprint}
        try:
            opened = ask_once(self._open, _OPEN_S)
        except TimeoutError as error:
            opened = trouble_of(Path(config.disk_dir), error)
        if isinstance(opened, Trouble):
            self.secret, self._refusal = os.urandom(SECRET_BYTES), opened.what
            logger.warning("nothing is kept on disk: %s", opened)
            self._writer = self._writer_of(replace(config, disk_bytes=0), self.secret)
        else:
            self.secret, self._writer = opened
            self._writer.start()

    def _open(self) -> tuple[bytes, Writer] | Trouble:
        """Return the secret and the writer of the folder, which is made where there is none, or why it cannot be."""
        folder = Path(self._config.disk_dir)
        try:
            secret = open_folder(folder)
            return secret, self._writer_of(self._config, secret)
        except OSError as error:
            return trouble_with(folder) or trouble_of(folder, error)

    def _writer_of(self, config: TierConfig, secret: bytes) -> Writer:
        return Writer(BlockFiles(self._folder, self._index, config, about=self._about, secret=secret))

    @property
    def version(self) -> int:
        """A number that changes with what is known to lie here."""
        return self._writer.n_changes + self._index.version

    def children(self, parent: Key) -> Sequence[Block]:
        """Return the blocks that follow `parent`."""
        return [] if self._refusal else [found.block for found in self._index.children(parent)]

    def find(self, parent: Key, key: Key) -> Block | None:
        """Return one block that follows `parent`, looking at no other file."""
        waiting = self._writer.pending(key)
        if waiting is not None:
            return waiting.block
        found = None if self._refusal else self._index.find(parent, key)
        return None if found is None else found.block

    def known(self, key: Key) -> Block | None:
        """Return a block that lies here, or will in a moment, as far as is known without asking the disk."""
        waiting = self._writer.pending(key)
        if waiting is not None:
            return waiting.block
        found = self._index.get(key)
        return None if found is None else found.block

    def holds(self, key: Key) -> bool:
        """Say whether a block lies here, or will in a moment, as far as is known without asking the disk."""
        return self.known(key) is not None

    def read(self, block: Block) -> bytes | None:
        """Return a block's verified bytes; None = they are gone, or were wrong and are set aside."""
        waiting = self._writer.pending(block.key)
        waiting_blob = None if waiting is None or waiting.block != block else waiting.blob
        if waiting_blob is not None:
            return waiting_blob
        found = self._index.get(block.key)
        is_pinned = found is not None and found.is_pinned
        for pinned in () if self._refusal else (is_pinned, not is_pinned):
            blob = self._read(self._index.place(block, is_pinned=pinned), block)
            if blob is not None:
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
        is_shared: bool = False,
        wait_s: float = 0.0,
    ) -> bool:
        """Have a block written if the rules allow it; say whether it lies here, or soon will.

        `is_shared`: RAM holds these bytes, and says so where it lets go of them (`unshare`). `wait_s`: at most that
        long for room in the queue.
        """
        waiting, found = self._writer.pending(block.key), self._index.get(block.key)
        for one in (waiting, found):
            is_as_good = one is not None and (block.is_bare or not one.block.is_bare)
            if one is not None and is_as_good and (one.is_pinned or not is_pinned):
                return True
        write = Write(block, blob, prefix_tokens, is_pinned, is_second_use, is_shared)
        if self._refusal or self._writer.is_resting or not self._writer.files.allows(write):
            return False
        return self._writer.put(write, wait_s=wait_s)

    def unshare(self, keys: Sequence[Key]) -> None:
        """Take note that RAM lets go of blocks: those that wait stay here, as far as there is room for them."""
        self._writer.unshare(keys)

    def has_written(self, key: Key) -> bool:
        """Say whether a block lies here now, as far as is known without asking the disk."""
        return self._index.get(key) is not None

    def used(self, keys: Sequence[Key]) -> None:
        """Make blocks the most recently used."""
        if not self._refusal:
            self._writer.touch(keys)

    def used_s(self, key: Key) -> float | None:
        """Return when a block was last used (Unix seconds), as far as is written down; None where it is not."""
        found = self._index.get(key)
        if found is not None:
            with contextlib.suppress(OSError):
                return os.lstat(found.path).st_mtime
        return None

    def set_aside(self, key: Key) -> None:
        """Set aside the file of a block whose bytes are of no use."""
        self._writer.drop(key)
        found = self._index.get(key)
        if found is not None:
            self._aside(found.path, "the engine refused its bytes")
            self._index.drop(key)

    def distrust(self, keys: Sequence[Key]) -> None:
        """Let blocks pass for absent until somebody looks for them again: no file is touched, and nobody waited for."""
        self._index.distrust(keys)

    def clear(self) -> tuple[int, int]:
        """Delete this engine's files, those that are pinned too; return how many, and their bytes."""
        self._writer.drop_all()
        deleted = Deleted() if self._refusal else delete_blocks(self._folder)
        self._index.forget_all()
        self._writer.files.room.less(deleted.n_bytes)
        return deleted.n_blocks, deleted.n_bytes

    def stats(self) -> DiskStats:
        """Return what is known of the folder, at once; have the writer's thread look, if it has not yet."""
        writer = self._writer
        writer.look()
        return DiskStats(
            folder=self._config.disk_dir,
            limit_bytes=writer.files.room.limit_bytes,
            used_bytes=writer.files.room.used_bytes,
            n_written=writer.n_written,
            written_bytes=writer.written_bytes,
            n_read=self._n_read,
            n_bad=self._index.n_bad,
            n_evicted=writer.files.room.n_evicted,
            n_dropped=writer.n_dropped,
            spent_today_bytes=writer.files.day.spent_bytes,
            daily_bytes=self._config.disk_daily_bytes,
            waiting_bytes=writer.waiting_bytes,
            failure=self._refusal or writer.failure,
            n_failed=writer.n_failed,
        )

    def close(self, *, flush_s: float) -> None:
        """End the writer once what waits is written, or `flush_s` have passed. Idempotent."""
        self._writer.close(flush_s)

    def _read(self, path: Path, block: Block) -> bytes | None:
        """Return what a file holds of a block; a bad one is set aside."""
        try:
            header, blob = read_file(path, _may_hold)
            kept = header.block
            if (kept.key, kept.parent, kept.start, kept.n_tokens) != (
                block.key,
                block.parent,
                block.start,
                block.n_tokens,
            ):
                raise BadFile("another block")
        except (NewerFile, MemoryError):
            return None
        except OSError as error:  # gone, or not to be had now: no fault of the file's
            if error.errno == errno.EIO:
                self._aside(path, "it cannot be read")
            return None
        except BadFile as error:
            self._aside(path, str(error))
            return None
        return None if kept.is_bare and not block.is_bare else blob

    def _aside(self, path: Path, reason: str) -> None:
        self._index.n_bad += 1
        files.set_aside(path)
        logger.warning("a file of what is kept on disk was set aside: %s", reason)


def _may_hold(n_bytes: int) -> bool:
    """Say whether a block may be read: a file that somebody made may be larger than all memory, and holds nothing."""
    return n_bytes <= _SMALL_BYTES or n_bytes <= available_bytes() // 2
