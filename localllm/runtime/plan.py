"""One step as the scheduler decided it: frozen, so that what was reserved is what runs."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.runtime.draft.base import Draft
from localllm.runtime.engine import Batch, BatchItem, Edit
from localllm.runtime.sequence import RequestRun, Sequence

NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One sequence's rows in a step. `takes_checkpoint`: its slot's state is kept after the forward."""

    sequence: Sequence
    item: BatchItem
    is_prefill: bool
    draft: Draft = NO_DRAFT
    takes_checkpoint: bool = False

    @property
    def is_lone_row(self) -> bool:
        """Say whether this is one row that wants its logits, as a decoding sequence brings."""
        return len(self.item.tokens) == self.item.n_logits == 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `edits` first, then one forward over the rows of `items`.

    `admitted`: those seated of whom it is not yet told what they begin with; `restoring`: those whose prefix
    is put back by the edits.
    """

    edits: tuple[Edit, ...]
    items: tuple[PlannedItem, ...]
    admitted: tuple[Sequence, ...] = ()
    restoring: tuple[Sequence, ...] = ()

    @property
    def runs(self) -> tuple[RequestRun, ...]:
        """The requests that have rows in it, or bytes of theirs put back."""
        sequences = (*(planned.sequence for planned in self.items), *self.restoring)
        return tuple({id(sequence.run): sequence.run for sequence in sequences}.values())

    @property
    def batch(self) -> Batch:
        """The forward's work."""
        return Batch(tuple(planned.item for planned in self.items))
