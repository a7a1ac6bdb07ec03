"""Which requests took a worker down: pure, times are given.

Suspected are the requests of the step in which a worker died by a fault of native code, or hung. Who
was suspected twice runs alone; who is at work alone when the worker dies again is refused. All of it
is forgotten after ten minutes. Requests are known by a keyed hash.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

KEPT_S = 600.0
N_BEFORE_ALONE = 2
NATIVE_DEATHS = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
"""The signals that count; being hung is the other death that does."""


@dataclass(slots=True)
class _Suspect:
    """One request's record."""

    n_deaths: int
    last_s: float
    is_refused: bool = False


class PoisonLedger:
    """The suspects of one model."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, _Suspect] = {}

    def died_with(self, fingerprints: Iterable[bytes], alone: frozenset[bytes], now_s: float) -> None:
        """Record the requests of a dying step. `alone`: those that this worker was told to run alone."""
        self._forget(now_s)
        dying = dict.fromkeys(fingerprints)
        for fingerprint in dying:
            suspect = self._suspects.setdefault(fingerprint, _Suspect(0, now_s))
            suspect.n_deaths += 1
            suspect.last_s = now_s
            suspect.is_refused |= len(dying) == 1 and fingerprint in alone

    def to_run_alone(self, now_s: float) -> list[bytes]:
        """Return the requests that a new worker runs with no others beside them."""
        self._forget(now_s)
        return [
            name
            for name, suspect in self._suspects.items()
            if suspect.n_deaths >= N_BEFORE_ALONE and not suspect.is_refused
        ]

    def to_refuse(self, now_s: float) -> list[bytes]:
        """Return the requests that a new worker does not run."""
        self._forget(now_s)
        return [name for name, suspect in self._suspects.items() if suspect.is_refused]

    def _forget(self, now_s: float) -> None:
        for name in [name for name, suspect in self._suspects.items() if now_s - suspect.last_s > KEPT_S]:
            del self._suspects[name]
