"""Blocks in memory under a byte budget: the least recently used go first, before them those that lie elsewhere too."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from localllm.runtime.kv.blocks import Block, Key

_LOOKED_AT = 64  # of the oldest entries, for one that is not lost by going


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a block beside its bytes. `prefix_tokens`: of the whole sequence that it was computed for."""

    prefix_tokens: int
    is_private: bool = False
    is_pinned: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A block that is held. `n_uses`: sequences that had it, the one that computed it included."""

    block: Block
    blob: bytes
    note: Note
    is_on_disk: bool = False
    n_uses: int = 1
    stamp: int = 0  # counts uses of the whole tier: the least was used longest ago
    used_s: float = 0.0  # Unix time of the last use


class RamTier:
    """Holds blobs by key, and knows which blocks follow a parent. Not thread safe: `Tiers` holds its lock."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.n_evicted = 0
        self._n_stamps = 0
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # in order of last use
        self._children: dict[Key, dict[Key, Block]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def get(self, key: Key) -> Entry | None:
        """Return what is held under a key."""
        return self._entries.get(key)

    def children(self, parent: Key) -> Collection[Block]:
        """Return the blocks that follow `parent`."""
        return self._children.get(parent, {}).values()

    def touch(self, key: Key) -> None:
        """Make an entry the most recently used."""
        self._entries.move_to_end(key)
        self._stamp(self._entries[key])

    def put(self, entry: Entry) -> list[Entry]:
        """Hold an entry, instead of one of its key; return those that had to go for it (itself, if it is too large)."""
        self.remove(entry.block.key)
        if len(entry.blob) > self.limit_bytes:
            return [entry]
        self._entries[entry.block.key] = entry
        self._stamp(entry)
        self._children.setdefault(entry.block.parent, {})[entry.block.key] = entry.block
        self.used_bytes += len(entry.blob)
        return self.shrink(self.limit_bytes)

    def remove(self, key: Key) -> Entry | None:
        """Give an entry up; None = there is none."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= len(entry.blob)
            siblings = self._children[entry.block.parent]
            del siblings[key]
            if not siblings:
                del self._children[entry.block.parent]
        return entry

    def shrink(self, to_bytes: int) -> list[Entry]:
        """Give entries up until at most `to_bytes` are held; return them. Pinned ones go last."""
        gone = []
        while self.used_bytes > to_bytes and self._entries:
            victim = self._victim()
            self.remove(victim.block.key)
            self.n_evicted += 1
            gone.append(victim)
        return gone

    def clear(self) -> None:
        """Give everything up."""
        self._entries.clear()
        self._children.clear()
        self.used_bytes = 0

    def _stamp(self, entry: Entry) -> None:
        self._n_stamps += 1
        entry.stamp, entry.used_s = self._n_stamps, time.time()

    def _victim(self) -> Entry:
        """Return the entry to give up: of the oldest few one that lies on disk too, else the oldest end of a sequence.

        A block without those before it is of no use, so what follows a block goes before it.
        """
        first, oldest = None, None
        for n_seen, entry in enumerate(self._entries.values()):
            first = first or entry
            if not entry.note.is_pinned:
                if entry.is_on_disk and n_seen < _LOOKED_AT:
                    return self._last_of(entry)
                oldest = oldest or entry
            if n_seen >= _LOOKED_AT and oldest is not None:
                break
        chosen = oldest or first
        assert chosen is not None
        return self._last_of(chosen)

    def _last_of(self, entry: Entry) -> Entry:
        """Return the least recently used end of what follows an entry."""
        while followers := self._children.get(entry.block.key):
            entry = min((self._entries[key] for key in followers), key=lambda e: (e.note.is_pinned, e.stamp))
        return entry
