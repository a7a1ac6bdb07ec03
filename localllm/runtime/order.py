"""Who is admitted next: FIFO within a priority, round robin over clients, nobody starves.

A small policy apart from token scheduling. Fairness by rounds: a client's k-th waiting sequence
stands k rounds behind the round being served, so one with 32 requests delays a newcomer by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from localllm.runtime.sequence import Embedding, Sequence

STARVED_AFTER_S = 30.0
_MANY_CLIENTS = 256

Waiter: TypeAlias = Sequence | Embedding


@dataclass(frozen=True, slots=True)
class _Ticket:
    waiter: Waiter
    round: int
    arrived_s: float
    number: int


class WaitingQueue:
    """The waiting sequences and texts to embed, in the order in which they should be admitted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tickets: dict[Waiter, _Ticket] = {}
        self._last_round: dict[str, int] = {}
        self._serving = 0
        self._count = 0
        self._n_of_run: dict[int, int] = {}
        self.n_texts = 0  # of those waiting: requests with texts to embed

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def n_requests(self) -> int:
        """Requests that have a sequence, or texts, here."""
        return len(self._n_of_run)

    def push(self, waiter: Waiter) -> None:
        """Queue a newcomer behind its own client's earlier ones."""
        client = waiter.run.client
        turn = max(self._serving, self._last_round.get(client, -1) + 1)
        if len(self._last_round) > 2 * len(self._tickets) + _MANY_CLIENTS:  # rounds that are over say nothing
            self._last_round = {c: last for c, last in self._last_round.items() if last >= self._serving}
        self._last_round[client] = turn
        self._add(waiter, turn)

    def push_back(self, waiter: Waiter) -> None:
        """Return a preempted one: it stands before every newcomer of its priority."""
        self._add(waiter, -1)

    def remove(self, waiter: Waiter) -> None:
        """Take one out, because it was admitted or has ended; idempotent."""
        ticket = self._tickets.pop(waiter, None)
        if ticket is not None:
            self._serving = max(self._serving, ticket.round)
            self.n_texts -= isinstance(waiter, Embedding)
            run = id(waiter.run)
            self._n_of_run[run] -= 1
            if not self._n_of_run[run]:
                del self._n_of_run[run]
        if not self._tickets:
            self._last_round.clear()

    def __iter__(self) -> Iterator[Waiter]:
        """Yield in order of admission; whoever has waited too long comes first, oldest first."""
        now_s = self._clock()

        def rank(ticket: _Ticket) -> tuple[bool, int, int, int]:
            starved = now_s - ticket.arrived_s > STARVED_AFTER_S
            place = (0, 0) if starved else (-ticket.waiter.run.priority, ticket.round)
            return (not starved, *place, ticket.number)

        return iter([ticket.waiter for ticket in sorted(self._tickets.values(), key=rank)])

    def _add(self, waiter: Waiter, turn: int) -> None:
        self._count += 1
        self.n_texts += isinstance(waiter, Embedding)
        run = id(waiter.run)
        self._n_of_run[run] = self._n_of_run.get(run, 0) + 1
        self._tickets[waiter] = _Ticket(waiter, turn, self._clock(), self._count)
