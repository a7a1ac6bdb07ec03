"""Seeded choices that are the same on every machine and with every version of everything."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_BLOCK_BYTES = 1_024
_UNPACK = struct.Struct(f"<{_BLOCK_BYTES // 4}I").unpack
BELL_ONE = 1 << 16  # what `bell` counts in: one standard deviation
_N_SUMMED = 12


class Draws:
    """An endless stream of draws that depends on its key alone.

    It is SHAKE-128 over key and block number: `random` and numpy's generators may change what a seed
    gives from one version to the next. Mutable: each draw moves it on.
    """

    __slots__ = ("_at", "_key", "_n_blocks", "_words")

    def __init__(self, *key: str | int) -> None:
        self._key = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
        self._n_blocks = 0
        self._words: tuple[int, ...] = ()
        self._at = 0

    def below(self, n: int) -> int:
        """Return a whole number from 0 to n - 1, each as likely (to within n / 2**32)."""
        if self._at == len(self._words):
            block = self._key + self._n_blocks.to_bytes(8, "little")
            self._words = _UNPACK(hashlib.shake_128(block).digest(_BLOCK_BYTES))
            self._n_blocks += 1
            self._at = 0
        word = self._words[self._at]
        self._at += 1
        return (word * n) >> 32

    def between(self, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`, both possible."""
        return least + self.below(most - least + 1)

    def pick(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return `items` in an order of chance."""
        left = list(items)
        for last in range(len(left) - 1, 0, -1):
            other = self.below(last + 1)
            left[last], left[other] = left[other], left[last]
        return left

    def bell(self) -> int:
        """Return a draw of (nearly) the normal distribution, in whole `BELL_ONE`ths of a standard deviation.

        The sum of twelve uniform draws less its mean: whole numbers only, so no mathematics library rounds it.
        """
        return sum(self.below(BELL_ONE) for _ in range(_N_SUMMED)) - _N_SUMMED // 2 * BELL_ONE
