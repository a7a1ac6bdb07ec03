"""The no-room table: what gives way, in which order, where slots, rows or cells are short.

Evict the least recently used retained slot, drop drafts and shrink prefill chunks, put off the text to embed,
preempt the youngest, and end the only one running with `length`. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from localllm.errors import ContextOverflow
from localllm.runtime.admission import Admission, first_to_yield
from localllm.runtime.chunks import ChunkPolicy
from localllm.runtime.embedding import PlannedChunk
from localllm.runtime.ends import Ends
from localllm.runtime.plan import StepPlan
from localllm.runtime.room import Room
from localllm.runtime.sequence import Sequence


class Shortage:
    """Answers that there is no room. `running` is the scheduler's; who gives way leaves it."""

    def __init__(
        self, running: list[Sequence], room: Room, chunks: ChunkPolicy, admission: Admission, ends: Ends
    ) -> None:
        self._running = running
        self._room = room
        self._chunks = chunks
        self._admission = admission
        self._ends = ends

    def of_step(self, plan: StepPlan) -> None:
        """Answer the engine's NoRoom for a step: undo the rows, then the next line of the table."""
        for planned in plan.items:
            if planned.sequence.slot is not None:
                self._room.slots.cut(planned.sequence.slot, planned.item.start)
        self._room.note_refusal()
        if not self._room.evict_one() and not self._chunks.shrink(plan.batch.n_rows, len(plan.items)):
            self.give_way()
            self._admission.shut()

    def of_text(self, planned: PlannedChunk) -> None:
        """Answer the engine's NoRoom for a chunk: evict, else begin the text anew when someone has left.

        Where nobody runs, its request fails.
        """
        self._room.note_refusal()
        if not self._room.evict_one():
            if self._running:
                self._admission.interrupt_text()
                self._admission.shut()
            else:
                index = planned.embedding.index
                error = ContextOverflow("The engine has no room for this text.", field="input", index=index)
                self._ends.fail(planned.run, error)

    def give_way(self) -> None:
        """The end of the table: put off a text, preempt the youngest, or end the only one."""
        if self._admission.interrupt_text():
            self._admission.shut()
        elif len(self._running) == 1:
            self._ends.end(self._running[0], "length")
        else:
            self._admission.preempt(first_to_yield(self._running), self._running)
