"""What waits to be written to disk: in the order in which it came, within the memory that it may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from localllm.runtime.kv.blocks import Block, Key

QUEUE_BYTES = 256 << 20
"""Of blocks that RAM does not hold as well; a larger one waits alone."""


@dataclass(slots=True, eq=False)
class Write:
    """A block that is to be written. `blob` None: it was let go of, and nobody wants it any more.

    `prefix_tokens`: of the sequence that it was computed for. `is_shared`: the RAM tier holds these very bytes,
    so that they take no memory here.
    """

    block: Block
    blob: bytes | None
    prefix_tokens: int
    is_pinned: bool
    is_second_use: bool = True
    is_shared: bool = False


class WriteQueue:
    """Writes in their order, and by key. Not thread safe: the writer holds its condition; `get` is for any thread.

    `waiting_bytes`: of all, with the one that is being written.
    """

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self._own_bytes = 0
        self._order: deque[Write] = deque()
        self._wanted: dict[Key, Write] = {}
        self._at_work: Write | None = None

    def __len__(self) -> int:
        return len(self._order)

    def get(self, key: Key) -> Write | None:
        """Return the write of a block that waits, or is written now."""
        return self._wanted.get(key)

    def has_room(self, write: Write) -> bool:
        """Say whether one more may wait."""
        return write.is_shared or not self._own_bytes or self._own_bytes + _size(write) <= QUEUE_BYTES

    def add(self, write: Write) -> None:
        """Have a block wait, in its place where it does already: what follows it may wait, too."""
        held = self._wanted.get(write.block.key)
        if held is None:
            self._order.append(write)
        elif held is self._at_work:  # it is written again, before what follows it
            self._order.appendleft(write)
        else:
            self._count(held, -1)
            held.block, held.blob, held.is_shared = write.block, write.blob, write.is_shared
            held.prefix_tokens = write.prefix_tokens
            held.is_pinned |= write.is_pinned
            held.is_second_use |= write.is_second_use
            write = held
        self._wanted[write.block.key] = write
        self._count(write, 1)

    def unshare(self, keys: Iterable[Key]) -> int:
        """Take note that RAM lets go of blocks; return how many wait no more, for want of room here."""
        n_dropped = 0
        for key in keys:
            write = self._wanted.get(key)
            if write is None or not write.is_shared:
                continue
            self._count(write, -1)
            write.is_shared = False
            has_room = self.has_room(write)
            self._count(write, 1)
            if write is not self._at_work and not has_room:
                n_dropped += self.drop(key)
        return n_dropped

    def drop(self, key: Key) -> bool:
        """Want a block no more; False = it did not wait."""
        write = self._wanted.pop(key, None)
        if write is not None and write is not self._at_work:
            self._count(write, -1)
            write.blob = None
        return write is not None

    def clear(self) -> int:
        """Want no block any more; return how many waited."""
        n_waiting = len(self._order)
        for key in list(self._wanted):
            self.drop(key)
        self._order.clear()
        return n_waiting

    def take(self) -> Write | None:
        """Return the next write, which is at work from now on until it is `done`; None = nothing waits."""
        self._at_work = self._order.popleft() if self._order else None
        return self._at_work

    def done(self, write: Write) -> None:
        """Take note that a write is no more at work."""
        self._at_work = None
        if write.blob is not None:
            self._count(write, -1)
        if self._wanted.get(write.block.key) is write:
            del self._wanted[write.block.key]

    def _count(self, write: Write, sign: int) -> None:
        self.waiting_bytes += sign * _size(write)
        self._own_bytes += 0 if write.is_shared else sign * _size(write)


def _size(write: Write) -> int:
    return len(write.blob or b"")
