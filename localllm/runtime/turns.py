"""Who is next where not all can be served at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """Remembers when each of those present had its last turn."""

    def __init__(self) -> None:
        self._last: dict[K, int] = {}
        self._n_turns = 0

    def order(self, present: Iterable[K]) -> list[K]:
        """Return those present, whose last turn is longest ago first; newcomers before all, as they were given.

        Those who are absent are forgotten.
        """
        self._last = {key: self._last.get(key, 0) for key in present}
        return sorted(self._last, key=self._last.__getitem__)

    def take(self, key: K) -> None:
        """Take note that someone has a turn now."""
        self._n_turns += 1
        self._last[key] = self._n_turns
