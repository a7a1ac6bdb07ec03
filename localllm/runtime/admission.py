"""Who gets on and off: seats, cells, requests that run alone, and a place for every newcomer.

A client that has nothing running is a newcomer: one seat beyond the others is kept for such, and
for one the youngest sequences of those who run several give their cells up. So nobody waits for
the whole of an answer that is another's second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.embedding import EmbedSeat
from localllm.runtime.engine import EngineSpec
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.order import Waiter, WaitingQueue
from localllm.runtime.room import Room
from localllm.runtime.sequence import Embedding, Phase, RequestRun, Sequence


class Admission:
    """The queue and its door. Mutated by the engine's thread alone."""

    def __init__(
        self, spec: EngineSpec, config: RuntimeConfig, room: Room, embeds: EmbedSeat, stats: RuntimeStats
    ) -> None:
        self.waiting = WaitingQueue()
        self._room = room
        self._embeds = embeds
        self._stats = stats
        n_places = min(spec.n_slots - 1, spec.max_batch_tokens)
        self._n_seats = min(config.max_running or n_places, n_places)
        self._n_kept = min(1, n_places - self._n_seats)
        self._min_wait_tokens = config.min_wait_prefix_tokens
        self._n_admitted = 0
        self._is_shut = False
        self._lone: RequestRun | None = None  # at work, until its last choice or text has ended

    def admit(self, running: list[Sequence]) -> list[Sequence]:
        """Move whoever may begin now from the queue to `running`, and return them; texts go to their own seat."""
        n_most = self._n_seats + self._n_kept
        is_full = len(running) >= n_most and (self._embeds.sitter is not None or not self.waiting.n_texts)
        if is_full or (self._is_shut and running):
            return []
        if self._lone is not None and self._lone.is_finished:
            self._lone = None
        self._is_shut, is_short, has_text, admitted = False, False, False, list[Sequence]()
        clients = {s.run.client for s in running}
        for waiter in self.waiting:
            if self._lone not in (None, waiter.run):
                continue
            if waiter.run.is_lone and self._lone is None and (running or self._embeds.sitter):
                break  # it waits for those at work, and is not overtaken meanwhile
            if isinstance(waiter, Embedding):
                if any(s.phase is Phase.RESTORING for s in running):
                    has_text = True
                else:
                    is_short |= not self._seat_text(waiter)
                continue
            is_newcomer = waiter.run.client not in clients
            if len(running) >= (n_most if is_newcomer else self._n_seats) or (is_short and not is_newcomer):
                continue
            if has_text and self._room.prefixes.best_start(waiter)[2]:
                continue  # a text before it waits until nothing is put back: else it might for ever
            leader = self._room.prefixes.leader_of(waiter, self._min_wait_tokens)
            if leader is not None:
                waiter.phase = Phase.WAITING_PREFIX
            elif self._seat(waiter, running, is_newcomer):
                admitted.append(waiter)
                clients.add(waiter.run.client)
            elif is_newcomer:
                break
            else:
                is_short = True  # behind it, only newcomers may begin
        return admitted

    def shut(self) -> None:
        """Admit nobody until one of those running has left: the engine had no room where the ledger saw some."""
        self._is_shut = True

    def reopen(self) -> None:
        """Take note that someone left."""
        self._is_shut = False

    def preempt(self, sequence: Sequence, running: list[Sequence]) -> None:
        """Send a running sequence back to the head of the queue; what it computed is the first to be given up."""
        self._stats.n_preemptions += 1
        sequence.n_lost = sequence.n_computed
        self._room.retire(sequence)
        running.remove(sequence)
        sequence.phase, sequence.links = Phase.QUEUED, ()
        self.waiting.push_back(sequence)

    def interrupt_text(self) -> bool:
        """Send the request whose text is being embedded back to the head of the queue; False = there is none."""
        embedding = self._embeds.leave()
        if embedding is None:
            return False
        self._stats.n_preemptions += 1
        self._stats.n_recomputed_tokens += embedding.n_computed
        self.waiting.push_back(embedding)
        return True

    def _seat_text(self, embedding: Embedding) -> bool:
        """Begin a request's next text; False = there are no cells for it."""
        if self._embeds.sitter is not None:
            return True
        if not self._embeds.seat(embedding):
            return False
        self._leave_queue(embedding)
        embedding.run.admit({"device": 0})
        return True

    def _seat(self, sequence: Sequence, running: list[Sequence], is_newcomer: bool) -> bool:
        started_s = time.perf_counter()
        is_alone = not running and self._embeds.sitter is None
        fits = is_alone or self._room.fits(sequence) or (is_newcomer and self._make_way(sequence, running))
        if fits:
            self._room.prefixes.mark_fork(sequence, self._min_wait_tokens)
        if not fits or not self._room.seat(sequence):
            self._room.note_refusal()
            return False
        sequence.run.timeline.add("match", time.perf_counter() - started_s)
        self._leave_queue(sequence)
        self._n_admitted += 1
        sequence.order = self._n_admitted
        sequence.phase = Phase.RESTORING if sequence.links else Phase.PREFILL
        sequence.run.seated()
        running.append(sequence)
        return True

    def _leave_queue(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        if waiter.run.is_lone:
            self._lone = waiter.run

    def _make_way(self, newcomer: Sequence, running: list[Sequence]) -> bool:
        """Preempt just as many as the newcomer needs, none that is its client's only one; False = none would do."""
        leaving = list[Sequence]()
        while True:
            spared = may_be_spared([s for s in running if s not in leaving], newcomer.run.priority)
            if not spared:
                return False
            leaving.append(first_to_yield(spared))
            if self._room.fits(newcomer, without=leaving):
                for sequence in leaving:
                    self.preempt(sequence, running)
                return True


def first_to_yield(running: Seq[Sequence]) -> Sequence:
    """Return whom to preempt: the youngest of the client that runs most, else the youngest of all."""
    n_of = Counter(s.run.client for s in running)
    return max(running, key=lambda s: (n_of[s.run.client], s.order))


def may_be_spared(running: Seq[Sequence], priority: int) -> list[Sequence]:
    """Return the sequences whose client runs others as well, and that matter no more than `priority`."""
    n_of = Counter(s.run.client for s in running)
    return [s for s in running if n_of[s.run.client] > 1 and s.run.priority <= priority]
