"""Blocks in memory under a byte budget: the least recently used go first, before them those that lie elsewhere too.

Before all of these go fleeting ones, which may be of no use already.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from localllm.runtime.kv.blocks import MARK_BYTES, Block, Key
from localllm.runtime.kv.siblings import Siblings

_LOOKED_AT = 16  # of the ends that were not used for longest, for one that is not lost by going
_REMEMBERED_KEYS = 65_536  # of blocks that had to go
_STALE_SHARE = 4  # entries of the heap for each block, at most
_FIRST_TO_GO = 1 << 62  # uses by which a fleeting block is behind all others


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a block beside its bytes.

    `prefix_tokens`: of the whole sequence that it was computed for. `is_fleeting`: one connection alone finds it,
    and nobody once that is closed.
    """

    prefix_tokens: int
    is_private: bool = False
    is_pinned: bool = False
    is_fleeting: bool = False

    def and_also(self, other: Note) -> Note:
        """Return what holds of a block that two sequences had: private no more, unless pinned for who is."""
        notes = (self, other)
        is_private = all(note.is_private for note in [note for note in notes if note.is_pinned] or notes)
        told = [note.prefix_tokens for note in notes if note.is_private == is_private]  # no private length
        is_pinned, is_fleeting = self.is_pinned or other.is_pinned, self.is_fleeting and other.is_fleeting
        return Note(max(told), is_private, is_pinned, is_fleeting)


@dataclass(slots=True, eq=False)
class Entry:
    """A block that is held. `stamp`: the lower, the sooner it goes; `used_s`: Unix time of the last use."""

    block: Block
    blob: bytes
    note: Note
    stamp: int = 0
    used_s: float = 0.0


class RamTier:
    """Holds blobs by key, and knows which blocks follow a parent. Not thread safe: `Tiers` holds its lock.

    Only ends of sequences go: a block without those before it is of no use. `lies_elsewhere`: says of a key
    whether its block would not be lost. `version` changes with what is held.
    """

    def __init__(self, limit_bytes: int, lies_elsewhere: Callable[[Key], bool] = lambda _: False) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.n_evicted = 0
        self.version = 0
        self._lies_elsewhere = lies_elsewhere
        self._n_stamps = 0
        self._entries: dict[Key, Entry] = {}
        self._evicted: dict[Key, None] = {}
        self._followers: dict[Key, Siblings] = {}
        self._ends: list[tuple[int, Key]] = []  # a heap of stamps; what has changed since is passed over

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
        return self._siblings(parent).blocks

    def has_children(self, parent: Key) -> bool:
        """Say whether any block follows `parent`."""
        return parent in self._followers

    def nearest(self, parent: Key, marks: bytes) -> Block | None:
        """Return the block after `parent` that has the most tokens in common with what `marks` were made of."""
        return self._siblings(parent).nearest(marks)

    def beginnings(self, parent: Key, marks: bytes) -> Iterator[Block]:
        """Yield the blocks after `parent` that are wholly a beginning of those tokens, longest first."""
        return self._siblings(parent).beginnings(marks)

    def touch(self, keys: Iterable[Key]) -> None:
        """Make entries the most recently used, the last of them most; those that are not held are passed over."""
        now_s = time.time()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._stamp(entry, now_s)

    def put(self, entry: Entry) -> list[Entry]:
        """Hold an entry, instead of one of its key; return those that had to go for it.

        That is itself if it is too large, or if others would go for what is of no use: the end of a sequence
        whose beginning was too long for the tier.
        """
        key, parent = entry.block.key, entry.block.parent
        self.remove(key)
        is_of_use = not entry.block.start or parent in self._entries or self._lies_elsewhere(parent)
        if len(entry.blob) > self.limit_bytes - (0 if is_of_use else self.used_bytes):
            self._remember(key)
            return [entry]
        self.version += 1
        self._evicted.pop(key, None)
        self._entries[key] = entry
        self._followers.setdefault(parent, Siblings()).add(entry.block)
        self.used_bytes += len(entry.blob)
        self._stamp(entry, time.time())
        return self.shrink(self.limit_bytes)

    def remove(self, key: Key) -> Entry | None:
        """Give an entry up; None = there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.version += 1
        self.used_bytes -= len(entry.blob)
        parent, siblings = entry.block.parent, self._followers[entry.block.parent]
        siblings.remove(key)
        if not siblings:
            del self._followers[parent]
            self._offer(self._entries.get(parent))
        return entry

    def drop_beginnings(self, entry: Entry) -> None:
        """Let go of blocks that are but the beginning of a held one which will be kept as long."""
        block, note = entry.block, entry.note
        for other in tuple(self.beginnings(block.parent, block.marks[:-MARK_BYTES])) if block.key in self else ():
            held = self._entries[other.key]
            if not held.note.is_pinned and (held.note.is_private or not note.is_private):
                self.remove(other.key)

    def shrink(self, to_bytes: int) -> list[Entry]:
        """Give entries up until at most `to_bytes` are held; return them. Pinned ones go last."""
        gone = []
        while self.used_bytes > to_bytes and self._entries:
            victim = self._victim() or self._pinned_victim()
            self.remove(victim.block.key)
            self._remember(victim.block.key)
            gone.append(victim)
        return gone

    def was_evicted(self, key: Key) -> bool:
        """Say whether a block was here and had to go, as far back as that is remembered."""
        return key in self._evicted

    def by_worth(self) -> list[Entry]:
        """Return all, those first that are of most use: the newest, each after those before it in its sequence."""
        ordered = dict[Key, Entry]()
        for entry in sorted(self._entries.values(), key=lambda entry: entry.stamp, reverse=True):
            chain, end = list[Entry](), entry.block.end
            at: Entry | None = entry
            while at is not None and at.block.key not in ordered and at.block.end == end:  # a file may lie
                chain.append(at)
                end = at.block.start
                at = self._entries.get(at.block.parent)
            ordered.update((one.block.key, one) for one in reversed(chain))
        return list(ordered.values())

    def clear(self) -> None:
        """Give everything up."""
        self.version += 1
        self._entries.clear()
        self._followers.clear()
        self._ends.clear()
        self._evicted.clear()
        self.used_bytes = 0

    def _remember(self, key: Key) -> None:
        self.n_evicted += 1
        self._evicted[key] = None
        if len(self._evicted) > _REMEMBERED_KEYS:
            del self._evicted[next(iter(self._evicted))]

    def _siblings(self, parent: Key) -> Siblings:
        found = self._followers.get(parent)
        return Siblings() if found is None else found

    def _stamp(self, entry: Entry, now_s: float) -> None:
        self._n_stamps += 1
        entry.stamp, entry.used_s = self._n_stamps - _FIRST_TO_GO * entry.note.is_fleeting, now_s
        self._offer(entry)

    def _offer(self, entry: Entry | None) -> None:
        """Put an entry among those that may go, if it may."""
        if entry is None or not self._may_go(entry):
            return
        heapq.heappush(self._ends, (entry.stamp, entry.block.key))
        if len(self._ends) > _STALE_SHARE * (len(self._entries) + _LOOKED_AT):
            self._ends = [(e.stamp, key) for key, e in self._entries.items() if self._may_go(e)]
            heapq.heapify(self._ends)

    def _may_go(self, entry: Entry) -> bool:
        return not entry.note.is_pinned and entry.block.key not in self._followers

    def _victim(self) -> Entry | None:
        """Return the end to give up: of the oldest few one that lies elsewhere too, else the oldest; None = no end."""
        seen = list[Entry]()
        chosen: Entry | None = None
        while self._ends and len(seen) < _LOOKED_AT and chosen is None:
            stamp, key = heapq.heappop(self._ends)
            entry = self._entries.get(key)
            if entry is None or entry.stamp != stamp or not self._may_go(entry):
                continue
            seen.append(entry)
            chosen = entry if entry.note.is_fleeting or self._lies_elsewhere(key) else None
        chosen = chosen or (seen[0] if seen else None)
        for entry in seen:
            if entry is not chosen:
                heapq.heappush(self._ends, (entry.stamp, entry.block.key))
        return chosen

    def _pinned_victim(self) -> Entry:
        """Return the least recently used of the ends, of which all are pinned; where there are none, of all."""
        ends = [entry for key, entry in self._entries.items() if key not in self._followers]
        return min(ends or self._entries.values(), key=lambda entry: entry.stamp)
