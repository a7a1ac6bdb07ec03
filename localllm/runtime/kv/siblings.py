"""The blocks that follow one parent, in order of their marks: which has the most in common is found in a few steps.

Marks stand for all tokens up to their own, so blocks that begin alike lie side by side: of thousands of
conversations that part after one system prompt only two neighbours are looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator

from localllm.runtime.kv.blocks import MARK_BYTES, Block, Key


class Siblings:
    """The blocks after one parent. Not thread safe."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self._order: list[tuple[bytes, Key]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> Collection[Block]:
        """All of them."""
        return self._blocks.values()

    def add(self, block: Block) -> None:
        """Take a block in, instead of one of its key."""
        self.remove(block.key)
        self._blocks[block.key] = block
        insort(self._order, (block.marks, block.key))

    def remove(self, key: Key) -> None:
        """Let a block go. Idempotent."""
        block = self._blocks.pop(key, None)
        if block is not None:
            del self._order[bisect_left(self._order, (block.marks, key))]

    def nearest(self, marks: bytes) -> Block | None:
        """Return the block that has the most tokens in common with what `marks` were made of; None = none has any."""
        at = bisect_left(self._order, (marks, b""))
        best, n_best = None, 0
        for _, key in self._order[max(0, at - 1) : at + 1]:  # common beginnings lie next to each other
            n_common = self._blocks[key].n_common(marks)
            if n_common > n_best:
                best, n_best = self._blocks[key], n_common
        return best

    def beginnings(self, marks: bytes) -> Iterator[Block]:
        """Yield the blocks all of whose tokens are the first of those that `marks` were made of, longest first."""
        while marks:
            at = bisect_right(self._order, (marks, b"\xff" * 2 * MARK_BYTES)) - 1
            if at < 0:
                return
            block = self._blocks[self._order[at][1]]
            n_common = block.n_common(marks)
            if n_common and n_common == block.n_tokens:
                yield block
                n_common -= 1
            marks = marks[: n_common * MARK_BYTES]
