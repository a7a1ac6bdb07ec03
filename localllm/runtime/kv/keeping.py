"""What is kept below the device: blocks held in RAM as long as there is room, and handed on to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localllm.models.available import available_bytes, total_bytes
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.matching import CutRule
from localllm.runtime.kv.ram import Entry, Note, RamTier

if TYPE_CHECKING:
    from localllm.runtime.kv.disk import DiskTier

_PRESSED_SHARE = 0.05  # of all memory: with less available the tier shrinks
_PRESSURE_CHECK_S = 1.0


class Keeper:
    """Puts blocks into RAM, and has written what is to lie on disk. Thread safe; `lock` is held round uses of `ram`."""

    def __init__(self, ram: RamTier, disk: DiskTier | None, rule: CutRule, lock: threading.Lock) -> None:
        self._ram = ram
        self._disk = disk
        self._rule = rule
        self._lock = lock
        self._checked_s = 0.0

    def put(self, block: Block, blob: bytes, note: Note) -> None:
        """Keep a block that was exported; what the rules allow goes on to the disk."""
        with self._lock:
            held, was_evicted = self._ram.get(block.key), self._ram.was_evicted(block.key)
            if held is not None and block.is_bare and not held.block.is_bare:  # what is held is of more use
                block, blob = held.block, held.blob
            kept = note if held is None else held.note.and_also(note)
            entry = Entry(block, blob, kept)
            if not (block.is_bare and self._lies_whole_on_disk(block.key)):  # a bare one in RAM would stand before it
                self._hold(entry)
        if not note.is_private:  # also of a block that others have as well: a private request writes nothing
            own = Entry(block, blob, note) if kept.is_private else entry  # a private pin pins no file
            self._write(own, is_second_use=was_evicted)

    def put_read(self, block: Block, blob: bytes) -> None:
        """Keep a block in RAM that was read from disk."""
        with self._lock:
            self._hold(Entry(block, blob, Note(block.end)))

    def pin(self, key: Key, note: Note) -> bool:
        """Put a block under a note that pins it, without exporting it anew; False = RAM does not hold all of it."""
        with self._lock:
            entry = self._ram.get(key)
        if entry is None or entry.block.is_bare:
            return False
        self.put(entry.block, entry.blob, note)
        return True

    def used(self, keys: Iterable[Key], in_part: Key | None, *, is_private: bool) -> None:
        """Take note that another sequence had the blocks of these keys, given from the first on.

        `in_part`: of the block after them it had but the beginning. The rest may be private still, so nothing comes of
        that but that the block stays longer. A private use leaves no trace on disk.
        """
        keys, unwritten = list(keys), list[Entry]()
        touched = keys if in_part is None else [*keys, in_part]
        with self._lock:
            self._ram.touch(reversed(touched))  # the first become the newest: the others are of no use without
            for key in () if is_private else keys:
                entry = self._ram.get(key)
                if entry is None:
                    continue
                own = entry
                if entry.note.is_private:  # how long that prompt was stays unknown, and that it was pinned
                    own = Entry(entry.block, entry.blob, Note(entry.block.end))
                    entry.note = entry.note.and_also(own.note)
                if not self._lies_on_disk(key):
                    unwritten.append(own)
        for entry in unwritten:
            self._write(entry, is_second_use=True)
        if self._disk is not None and not is_private:
            self._disk.used([key for key in touched if self._disk.holds(key)])

    def write_held(self, end_s: float, *, pins_only: bool) -> None:
        """Have written what RAM holds and the disk lacks, what is of most use first. `end_s`: monotonic seconds."""
        with self._lock:
            entries = [] if self._disk is None else self._ram.by_worth()
        for entry in entries:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            if entry.note.is_pinned or (not pins_only and not self._lies_on_disk(entry.block.key)):
                self._write(entry, is_second_use=True, wait_s=left_s)

    def limit_ram(self, limit_bytes: int) -> None:
        """Keep at most so much in RAM from now on."""
        with self._lock:
            self._ram.limit_bytes = limit_bytes
            self._unshare(self._ram.shrink(limit_bytes))

    def _lies_on_disk(self, key: Key) -> bool:
        return self._disk is not None and self._disk.holds(key)

    def _lies_whole_on_disk(self, key: Key) -> bool:
        block = None if self._disk is None else self._disk.known(key)
        return block is not None and not block.is_bare

    def _write(self, entry: Entry, *, is_second_use: bool, wait_s: float = 0.0) -> None:
        if self._disk is None or entry.note.is_private:
            return
        held = self._ram.get(entry.block.key)
        self._disk.write(
            entry.block,
            entry.blob,
            prefix_tokens=entry.note.prefix_tokens,
            is_second_use=is_second_use,
            is_pinned=entry.note.is_pinned,
            is_shared=held is not None and held.blob is entry.blob,
            wait_s=wait_s,
        )

    def _hold(self, entry: Entry) -> None:
        """Hold a block in RAM, instead of what must go for it. Called under the lock."""
        if not self._ram.limit_bytes:
            return
        self._unshare(self._ram.put(entry))
        if self._rule is CutRule.ANYWHERE:
            self._ram.drop_beginnings(entry)
        self._relieve()

    def _relieve(self) -> None:
        """Halve the tier where the machine has hardly any memory left."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _PRESSURE_CHECK_S:
            self._checked_s = now_s
            if available_bytes() < _PRESSED_SHARE * total_bytes():
                self._unshare(self._ram.shrink(self._ram.used_bytes // 2))

    def _unshare(self, gone: list[Entry]) -> None:
        """Tell the disk tier of blocks that RAM lets go of. Called under the lock."""
        if gone and self._disk is not None:
            self._disk.unshare([entry.block.key for entry in gone])
