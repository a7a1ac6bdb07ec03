"""Spaces out work so that it never costs more than a small share of one core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """When something is due: at most every `every_s`, and rarer where it costs more than `share` of a core.

    Used by one thread alone, whose CPU time is what counts.
    """

    def __init__(self, every_s: float, share: float) -> None:
        self._every_s = every_s
        self._share = share
        self._due_s = 0.0
        self.spent_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it may be done now."""
        return time.monotonic() >= self._due_s

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is done inside."""
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            cost_s = time.thread_time() - begun_cpu_s
            self.spent_s += cost_s
            self._due_s = begun_s + max(self._every_s, cost_s / self._share)
