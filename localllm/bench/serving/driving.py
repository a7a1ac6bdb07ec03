"""Sends the chosen asks at a load, and keeps what became of them until the end, a stop, or the server's death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from localllm.bench.client.arrivals import arrival_offsets
from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.load import closed_loop, open_loop
from localllm.bench.serving.spec import Load

N_DOWN = 3
"""So many requests in a row that reach nobody, or are not answered in all their time, and the server is dead."""
PROGRESS_EVERY_S = 0.2

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Hears what is done, how much of it, and of how much (0: not known)."""


@dataclass(slots=True)
class Kept:
    """The outcomes of one phase, in the order of their ends. One owner: the loop that drives.

    `stop` is set when the server is taken for dead. `n_total`: how many there will be; 0: until the time is up.
    """

    what: str
    on_progress: OnProgress
    stop: asyncio.Event
    n_total: int = 0
    duration_s: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    is_dead: bool = False
    _began_s: float = field(default_factory=time.perf_counter)
    _told_s: float = 0.0
    _n_down: int = 0
    _n_errors: int = 0
    _n_tokens: int = 0

    def __call__(self, outcome: Outcome) -> None:
        """Keep one outcome."""
        if outcome.end is End.CANCELLED:  # by a stop: it was not to end like that
            return
        self.outcomes.append(outcome)
        self._n_down = self._n_down + 1 if outcome.end in (End.UNREACHABLE, End.TIMED_OUT) else 0
        self._n_errors += outcome.end is not End.ANSWER
        self._n_tokens += outcome.output_tokens
        if self._n_down >= N_DOWN:
            self.is_dead = True
            self.stop.set()
        if outcome.ended_s - self._told_s >= PROGRESS_EVERY_S or len(self.outcomes) == self.n_total:
            self._told_s = outcome.ended_s
            self.tell(outcome.ended_s)

    def tell(self, now_s: float) -> None:
        """Tell how far it is."""
        passed_s = max(now_s - self._began_s, 1e-9)
        errors = f", {self._n_errors} error{'s' * (self._n_errors != 1)}" if self._n_errors else ""
        told = f"{self.what}: {self._n_tokens / passed_s:.0f} tokens/s{errors}"
        if self.n_total or self.duration_s is None:
            self.on_progress(told, len(self.outcomes), self.n_total)
        else:
            self.on_progress(told, min(int(passed_s), int(self.duration_s)), int(self.duration_s))


async def drive(
    target: Target,
    load: Load,
    sessions: Sequence[Sequence[Call]],
    further: Iterator[Iterable[Call]],
    kept: Kept,
) -> None:
    """Let the load's clients take a session each, and the next when it is done. `further`: those not made yet."""
    supply = chain(sessions, further)

    def one_client() -> Iterator[Call]:
        for session in supply:
            yield from session

    clients = [one_client() for _ in range(load.concurrency or 1)]
    await closed_loop(target, clients, kept, duration_s=kept.duration_s, stop=kept.stop)


async def arrive(target: Target, arrivals: Iterable[tuple[float, Call]], kept: Kept) -> None:
    """Send each call at its time."""
    await open_loop(target, arrivals, kept, stop=kept.stop)


def offsets(load: Load, seed: int, n_most: int | None, duration_s: float | None) -> Iterator[float]:
    """Yield the times of arrivals in seconds, until either limit."""
    for n, offset_s in enumerate(arrival_offsets(load.rate_per_s or 1.0, load.shape, seed)):
        if (n_most is not None and n >= n_most) or (duration_s is not None and offset_s >= duration_s):
            return
        yield offset_s
