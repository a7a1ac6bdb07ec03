"""Tells requests that computing begins, once it is known with what their sequences begin.

Owns whom it is still to be told of. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.room import Room
from localllm.runtime.sequence import Phase, Sequence


class Starts:
    """The sequences that were seated, and are not yet known to begin with what."""

    def __init__(self, room: Room, stats: RuntimeStats) -> None:
        self._room = room
        self._stats = stats
        self._untold: list[Sequence] = []

    def add(self, seated: Iterable[Sequence]) -> None:
        """Take in sequences that were given a slot."""
        self._untold += seated

    def untold(self, restoring: Container[Sequence]) -> tuple[Sequence, ...]:
        """Return whom it is still to be told of; of those whose prefix is put back, who is in `restoring`."""
        return tuple(s for s in self._untold if s.phase is not Phase.RESTORING or s in restoring)

    def tell(self) -> bool:
        """Tell of the sequences that have what was known of them, and count it; False = there are none."""
        ready = [s for s in self._untold if s.slot is None or s.phase is not Phase.RESTORING]
        self._untold = [s for s in self._untold if s not in ready]
        for sequence in ready:
            if sequence.slot is None:
                continue
            self._room.drop_gapped(sequence)  # before its first row runs
            cached = sequence.cached_tokens
            if sequence.run.admit(cached):
                self._stats.count_cached(cached)
            self._stats.n_recomputed_tokens += max(0, sequence.n_lost - sequence.n_computed)
            sequence.n_lost = 0
            self._room.prefixes.count_use(sequence)
        return bool(ready)
