"""How far a pull is: one value for every kind of source, which never goes backwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

_INTERVAL_S = 0.1
_SPEED_WINDOW_S = 5.0


class Phase(Enum):
    """What a pull is doing."""

    WAITING = "waiting"  # another process pulls the same model
    FINDING = "finding"
    FETCHING = "fetching"
    RETRYING = "retrying"
    UNPACKING = "unpacking"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """One report. Within a phase and `what`, `done_bytes` never falls.

    `total_bytes` None where the source does not say. `bytes_per_s` over the last seconds. `note` a sentence
    (who is waited for, why it is tried again).
    """

    phase: Phase
    what: str
    done_bytes: int = 0
    total_bytes: int | None = None
    bytes_per_s: float = 0.0
    note: str = ""


OnProgress = Callable[[PullProgress], None]


class Meter:
    """Turns byte counts into reports: at most ten a second, and the last one always. Not for several threads."""

    def __init__(self, on_progress: OnProgress | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_progress = on_progress
        self._clock = clock
        self._what = ""
        self._phase = Phase.FINDING
        self._total: int | None = None
        self._done = 0
        self._reported_at = float("-inf")
        self._samples: list[tuple[float, int]] = []

    def start(self, phase: Phase, what: str, total_bytes: int | None = None) -> None:
        """Begin a phase; counting starts at 0."""
        self._phase, self._what, self._total, self._done = phase, what, total_bytes, 0
        self._samples = []
        self._report()

    def at(self, done_bytes: int) -> None:
        """Say how many bytes of this phase are done; a smaller number than before is not shown."""
        now = self._clock()
        self._samples = [s for s in self._samples if now - s[0] <= _SPEED_WINDOW_S] + [(now, done_bytes)]
        self._done = max(self._done, done_bytes)
        if now - self._reported_at >= _INTERVAL_S or self._done == self._total:
            self._report()

    def say(self, phase: Phase, note: str) -> None:
        """Report a sentence (waiting, trying again) at the present count."""
        self._report(phase, note)

    def _report(self, phase: Phase | None = None, note: str = "") -> None:
        if self._on_progress is None:
            return
        self._reported_at = self._clock()
        self._on_progress(PullProgress(phase or self._phase, self._what, self._done, self._total, self._speed(), note))

    def _speed(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (end - start)) if end > start else 0.0
