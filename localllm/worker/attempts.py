"""When a model was tried, and what came of it: how long it may still take, and when another try is of use."""

from __future__ import annotations

import math
import time

from localllm.worker.lifecycle import ModelState
from localllm.worker.naming import Known

_USUAL_LOAD_S = 5.0


class Attempts:
    """The times of one model's loads and failures, and the file as it was when it was refused."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._began_s = self._due_s = 0.0
        self._load_s = _USUAL_LOAD_S
        self._failed_s = -math.inf
        self._refused_identity: object = None

    def due_in(self, delay_s: float) -> None:
        """Take note that the next attempt begins in so long."""
        self._due_s = time.monotonic() + delay_s

    def began(self) -> None:
        """Take note that an attempt begins."""
        self._began_s = time.monotonic()

    def loaded(self) -> float:
        """Take note that the attempt went well; return how long it took."""
        self._load_s = time.monotonic() - self._began_s
        return self._load_s

    def refused(self) -> None:
        """Take note that the file as it is now is refused."""
        self._refused_identity = self._known.identity()

    def failed(self) -> None:
        """Take note that it is not tried again by itself."""
        self._failed_s = time.monotonic()

    def left_s(self, state: ModelState) -> float:
        """Return how long it may still take to be ready, judging by the last time."""
        start_s = self._due_s if state is ModelState.RESTARTING else self._began_s
        return start_s + self._load_s - time.monotonic()

    def is_of_use(self, state: ModelState, cooldown_s: float) -> bool:
        """Say whether to try again what rests in this state: not the same file that was refused, nor so soon."""
        is_same = state is ModelState.REFUSED and self._known.identity() == self._refused_identity
        is_cooling = state is ModelState.FAILED and time.monotonic() - self._failed_s < cooldown_s
        return not (is_same or is_cooling or self._known.problem)
