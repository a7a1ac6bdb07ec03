"""Decides which tokens are computed in the next step. Produces plans and edits, calls no engine.

RUNNING first, then WAITING, under the step's row budget. Prefill, decode, a prefix hit and a
preemption are one arithmetic (`Sequence.n_computed` against `n_tokens`). No room is a value: `Shortage`
says what gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm.errors import LocalLLMError
from localllm.runtime import events
from localllm.runtime.admission import Admission
from localllm.runtime.chunks import ChunkPolicy
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.draft.base import Draft
from localllm.runtime.embedding import EmbedSeat, PlannedChunk
from localllm.runtime.ends import Ends
from localllm.runtime.engine import Edit, EditResult, EngineSpec
from localllm.runtime.hooks import nothing_to_send
from localllm.runtime.kv.exports import Exports
from localllm.runtime.kv.restores import Restores
from localllm.runtime.kv.tiers import Tiers, no_tiers
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.plan import PlannedItem, StepPlan
from localllm.runtime.prefixes import Prospect
from localllm.runtime.readers import Readers
from localllm.runtime.room import Room
from localllm.runtime.rows import RowPlanner
from localllm.runtime.sequence import Phase, RequestRun, Sequence
from localllm.runtime.shortage import Shortage
from localllm.runtime.starts import Starts
from localllm.runtime.stream import EventSink


class Scheduler:
    """Queue, running sequences and their room. One thread owns it, the engine's."""

    def __init__(
        self,
        spec: EngineSpec,
        config: RuntimeConfig,
        cost: StepCost,
        published: Callable[[], None] = nothing_to_send,
        tiers: Tiers | None = None,
    ) -> None:
        self.spec = spec
        self.stats = RuntimeStats()
        self._min_wait_tokens = config.min_wait_prefix_tokens
        self.tiers = tiers or no_tiers(spec)
        self._room = Room(spec, self.stats, self.tiers, cost)
        self._restores = Restores(self._room, self.tiers, cost)
        self._chunks = ChunkPolicy(spec, config, cost, self.stats)
        self._rows = RowPlanner(spec, self._room, self._chunks)
        self._embeds = EmbedSeat(spec, config, self._room, self.stats)
        self._admission = Admission(spec, config, self._room, self._embeds, self.stats)
        self._waiting = self._admission.waiting
        self._running: list[Sequence] = []  # in order of admission
        self._readers = Readers(published)
        self._starts = Starts(self._room, self.stats)
        self._ends = Ends(self._running, self._admission, self._embeds, self._room, self._readers, self.tiers)
        self._shortage = Shortage(self._running, self._room, self._chunks, self._admission, self._ends)
        self.n_received = 0  # requests ever submitted; written here, read by any thread
        self._unsettled: tuple[Edit, ...] = ()  # of the plan at work, until the engine has answered

    @property
    def is_idle(self) -> bool:
        """Say whether nothing runs and nothing waits."""
        return not self._running and not len(self._waiting) and self._embeds.sitter is None

    @property
    def exports(self) -> Exports:
        """What slots hold that is still to be kept in a tier."""
        return self._room.exports

    def prospect(self, sequence: Sequence) -> Prospect:
        """Return what a sequence would begin with if it were seated now. It stays as it is."""
        return self._room.prefixes.prospect(sequence, self._min_wait_tokens)

    def clear_retained(self) -> int:
        """Clear what is kept of sequences that have ended; return the cells that this frees."""
        n_freed = self._room.clear_retained()
        self._publish()
        return n_freed

    @property
    def may_export(self) -> bool:
        """Say whether the spare slot is free for exporting."""
        return self._room.may_export

    @property
    def edited_slots(self) -> frozenset[int]:
        """The slots of which the engine is still to be told a change."""
        return self._room.edits.edited_slots

    @property
    def is_quiet(self) -> bool:
        """Say whether nobody waits for a next token."""
        return not any(s.phase is Phase.DECODE for s in self._running)

    @property
    def n_waiting(self) -> int:
        """Requests not yet admitted whole (may be read from any thread)."""
        return self._waiting.n_requests

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences whose next rows may carry a draft."""
        return [s for s in self._running if s.phase is Phase.DECODE]

    def submit(self, run: RequestRun) -> None:
        """Queue every choice of a request, or its texts to embed."""
        self._readers.add(run)
        run.outbox.append(events.Queued(run.request_id, self._waiting.n_requests))
        for sequence in run.sequences:
            self._waiting.push(sequence)
        if run.embedding is not None:
            self._waiting.push(run.embedding)
        self.n_received += 1
        self._publish()

    def cancel(self, sink: EventSink) -> None:
        """End what is left of a sink's request; unknown or ended ones are ignored."""
        run = self._readers.run_of(sink)
        if run is not None:
            self._ends.cancel(run)
            self._publish()

    def plan(self, drafts: Mapping[Sequence, Draft]) -> StepPlan | None:
        """Reserve slots, rows and cells for the next step; None = nothing to do."""
        restoring = dict[Sequence, None]()
        while True:
            self._starts.add(self._admission.admit(self._running))
            restoring.update(dict.fromkeys(self._restores.plan(self._running)))
            if self._running:
                self._room.trim(self._running)
            decodes, prefills = self._chunks.turns(self._running)
            items = self._decode_items(drafts) if decodes else []
            if prefills:
                prefilling = [s for s in self._running if s.phase is Phase.PREFILL]
                items += self._rows.prefill(prefilling, sum(len(planned.item.tokens) for planned in items))
            if not items and not decodes:
                items = self._decode_items(drafts)  # the turn was prefill's, which found no room
            if items or all(s.phase is Phase.RESTORING for s in self._running):
                break
            self._shortage.give_way()
        self._embeds.make_room(sum(len(planned.item.tokens) for planned in items))
        self._unsettled = edits = self._room.edits.take()
        self._publish()
        if not items and not edits:
            return None
        return StepPlan(edits, tuple(items), self._starts.untold(restoring), tuple(restoring))

    def settle(self, plan: StepPlan, results: list[EditResult]) -> StepPlan:
        """Take over how the edits went: a slot that came out shorter computes from there in the next step."""
        self._room.edits.settled(plan.edits, results)
        self._unsettled = ()
        for sequence in self.decoding:  # not only those in this step: a cut may have been refused
            if sequence.n_computed < sequence.n_tokens - 1:
                sequence.phase = Phase.PREFILL
        self._restores.settle(self._running)
        if self._starts.tell():
            self._publish()  # before a prefill that may take seconds
        kept = []
        for planned in plan.items:
            sequence, item = planned.sequence, planned.item
            if sequence.slot is not None and sequence.n_computed == item.start:
                self._room.slots.grow(sequence.slot, len(item.tokens))
                kept.append(planned)
        return replace(plan, items=tuple(kept))

    def shrink(self, plan: StepPlan) -> None:
        """Answer the engine's NoRoom: undo the rows, then the next line of the no-room table."""
        self._shortage.of_step(plan)
        self._publish()

    def fail(self, plan: StepPlan, error: LocalLLMError) -> None:
        """End the requests of a plan with an error; their slots are cleared."""
        for sequence in (*(p.sequence for p in plan.items), *plan.admitted, *self._room.distrust(self._unsettled)):
            self._ends.fail(sequence.run, error)
        self._unsettled = ()
        self._publish()

    def fail_request(self, run: RequestRun, error: LocalLLMError) -> None:
        """End one request with an error; its slots are cleared. Idempotent."""
        self._ends.fail(run, error)
        self._readers.send()

    def fail_all(self, error: LocalLLMError) -> None:
        """End every request with an error; what they computed is kept like that of others that end."""
        self._ends.fail_all(error)

    def take_edits(self) -> tuple[Edit, ...]:
        """Hand over the changes that the engine is still to be told, when no plan will come any more."""
        return self._room.edits.take()

    def tell_all(self, error: LocalLLMError) -> list[RequestRun]:
        """Tell every request that it failed, and return them; the books stay as they are (they may be broken)."""
        return self._readers.fail_all(error)

    def take_ended(self) -> list[Sequence]:
        """Hand over the sequences that ended, whatever the reason, since the last call."""
        return self._ends.take()

    def commit(self, planned: PlannedItem, n_taken: int, first_held: int) -> None:
        """Take note that an item ran and its sequence took `n_taken` tokens (0 = a chunk inside its prompt)."""
        sequence, slot, stats, n_draft = planned.sequence, planned.sequence.slot, self.stats, len(planned.draft)
        assert slot is not None
        slot.is_settling, slot.first_held = False, first_held
        if planned.is_prefill:
            stats.n_prompt_tokens_computed += len(planned.item.tokens)
        if n_taken == 0:
            sequence.run.outbox.append(events.Progress(sequence.n_computed, sequence.n_tokens))
            return
        n_accepted = n_taken - 1
        stats.n_generated_tokens += n_taken
        stats.n_accepted_draft_tokens += n_accepted
        stats.n_rejected_draft_tokens += n_draft - n_accepted
        sequence.run.n_accepted_draft_tokens += n_accepted
        sequence.run.n_rejected_draft_tokens += n_draft - n_accepted
        if n_accepted < n_draft:
            self._room.edits.roll_back(slot, sequence.n_tokens - 1)
        if sequence.phase is Phase.FINISHED:
            self._ends.leave(sequence)
        else:
            sequence.phase = Phase.DECODE

    def checkpointed(self, sequence: Sequence, blob: bytes) -> None:
        """Keep a checkpoint of the sequence's slot at its present length."""
        if sequence.slot is not None:
            self._room.add_checkpoint(sequence.slot, blob)

    def stepped(self, plan: StepPlan) -> None:
        """Count a step that went well, and hand its events to the readers."""
        self._chunks.relax()
        self.stats.n_steps += 1
        self.stats.n_rows += plan.batch.n_rows
        self._publish()

    def plan_embedding(self, spent_s: float) -> PlannedChunk | None:
        """Return the rows of a text that run after a step that took `spent_s`; None = none can."""
        return self._embeds.plan(len(self.decoding), spent_s)

    def embedded(self, planned: PlannedChunk, vector: NDArray[np.float32] | None, elapsed_s: float) -> None:
        """Take note of what a chunk gave; between two texts of a request, others have their turn."""
        embedding = planned.embedding
        if self._embeds.commit(planned, vector, elapsed_s):
            if embedding.is_finished:
                embedding.run.close()
            else:
                self._waiting.push(embedding)
        self._publish()

    def defer_embedding(self, planned: PlannedChunk) -> None:
        """Answer the engine's NoRoom for a chunk: evict, else begin the text anew when someone has left."""
        self._shortage.of_text(planned)
        self._publish()

    def _decode_items(self, drafts: Mapping[Sequence, Draft]) -> list[PlannedItem]:
        """One row for every decoding sequence, with its draft where there is room for it."""
        usable = self._chunks.drafts_that_fit(drafts, self._running)
        while (items := self._rows.decode(self.decoding, usable)) is None:
            self._room.note_refusal()
            if usable:
                usable = {}
            else:
                self._shortage.give_way()
        return items

    def _publish(self) -> None:
        """Flush events to the readers, forget requests that ended, refresh the gauges."""
        self._readers.publish()
        stats = self.stats
        stats.n_running = len(self._running) + (self._embeds.sitter is not None)
        stats.n_waiting = len(self._waiting)
        slots = self._room.slots
        stats.n_retained_slots, stats.used_cells, stats.retained_cells = (
            slots.n_retained,
            slots.used_cells,
            slots.retained_cells,
        )
