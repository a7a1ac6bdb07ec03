"""What a template may spend: operations, characters made and time, counted while it renders.

A running thread cannot be interrupted, so every operation that a template can reach reports here
before it costs anything.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

_CLOCK_EVERY = 64  # ticks between two looks at the clock
_LARGE_CHARS = 65_536  # an operation of this size looks at the clock itself
MAX_INT_BITS = 4_096
_MAX_PARTS = 100_000  # values inside one value
_MAX_DEPTH = 100  # nested macro and method calls


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one rendering. `n_chars_made` counts copies too; list elements count as eight."""

    seconds: float = 1.5
    n_operations: int = 3_000_000
    n_chars_made: int = 32_000_000


class OverBudget(Exception):
    """The template spends more than a rendering may."""


class Meter:
    """The running account of one compilation or rendering; its owner is the rendering thread."""

    __slots__ = ("_deadline", "_depth", "_limits", "_n_chars", "_n_operations")

    def __init__(self, limits: Limits, n_input_chars: int = 0) -> None:
        self._limits = limits
        self._n_operations = 0
        self._n_chars = -min(32 * n_input_chars, limits.n_chars_made)  # a long chat is copied a few times anyway
        self._depth = 0
        self._deadline = time.monotonic() + limits.seconds

    def tick(self, n_operations: int = 1) -> None:
        """Count operations. Raises: OverBudget."""
        before = self._n_operations
        self._n_operations = now = before + n_operations
        if now // _CLOCK_EVERY != before // _CLOCK_EVERY:
            if now > self._limits.n_operations:
                raise OverBudget(f"it takes more than {self._limits.n_operations} operations")
            self.look_at_clock()

    def charge(self, n_chars: int) -> None:
        """Count characters about to be made or read. Raises: OverBudget."""
        self._n_chars += n_chars
        if self._n_chars > self._limits.n_chars_made:
            raise OverBudget(f"it makes more than {self._limits.n_chars_made} characters of text")
        self.tick(1)
        if n_chars > _LARGE_CHARS:
            self.look_at_clock()

    def look_at_clock(self) -> None:
        """Raises: OverBudget past the deadline."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"it takes longer than {self._limits.seconds:g} s")

    def weigh(self, value: Any) -> int:
        """Count everything inside a value (shared parts each time they occur) and return its characters.

        To be called before anything that walks the value: comparing, sorting, hashing, printing.
        """
        if isinstance(value, str):
            if len(value) > 256:
                self.charge(len(value))
            return len(value)
        n_chars = n_parts = 0
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                n_chars += len(value) + 2
                continue
            if isinstance(value, Mapping):
                waiting.extend(value.keys())
                waiting.extend(value.values())
                n_parts += 2 * len(value)
            elif isinstance(value, (list, tuple, KeysView, ValuesView, ItemsView)):
                waiting.extend(value)
                n_parts += len(value)
            n_chars += 8
            if n_parts > _MAX_PARTS:
                raise OverBudget(f"it handles a value of more than {_MAX_PARTS} parts")
        self.tick(n_parts)
        self.charge(n_chars)
        return n_chars

    def integer(self, value: Any) -> Any:
        """Return `value`. Raises: OverBudget for an integer of more than MAX_INT_BITS bits."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise OverBudget(f"it computes with integers of more than {MAX_INT_BITS} bits")
        return value

    def enter(self) -> None:
        """Count one more nested call. Raises: OverBudget."""
        self.tick()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise OverBudget(f"it nests more than {_MAX_DEPTH} calls")

    def leave(self) -> None:
        """End the innermost nested call."""
        self._depth -= 1
