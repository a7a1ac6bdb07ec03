"""Changes of what slots hold, each recorded as the edit that makes the engine equal to it.

The next plan carries the edits, in order, before its rows. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from localllm.runtime.engine import (
    Clear,
    CopyPrefix,
    Edit,
    EditOutcome,
    EditResult,
    EngineSpec,
    ExportUnit,
    PrefixRule,
    Restore,
    Rewind,
    Truncate,
)
from localllm.runtime.kv.blocks import Block
from localllm.runtime.kv.exports import Exports
from localllm.runtime.kv.prefix_cache import PrefixCache
from localllm.runtime.kv.tiers import Link, Tiers
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.slots import Cut, Slot, Slots


class Edits:
    """What the engine is still to be told, and what becomes of it. Keeps `slots` equal to what the engine will hold."""

    def __init__(
        self, spec: EngineSpec, slots: Slots, index: PrefixCache, exports: Exports, tiers: Tiers, stats: RuntimeStats
    ) -> None:
        self._spec = spec
        self._slots = slots
        self._index = index
        self._exports = exports
        self._tiers = tiers
        self._stats = stats
        self._edits: list[Edit] = []
        self._restored: dict[int, Block] = {}  # by the identity of the edit that puts it back

    @property
    def is_empty(self) -> bool:
        """Say whether the engine has been told of every change."""
        return not self._edits

    @property
    def edited_slots(self) -> frozenset[int]:
        """The slots of which the engine is still to be told a change."""
        return frozenset(map(_edited_slot, self._edits))

    def is_unsettled(self, slot: Slot) -> bool:
        """Say whether the engine does not hold yet what the ledger says of a slot."""
        is_whole = self._spec.export_unit is ExportUnit.WHOLE  # else what a cut leaves can be taken out before it
        edits = (edit for edit in self._edits if is_whole or not isinstance(edit, Truncate))
        return any(_edited_slot(edit) == slot.id for edit in edits)

    def is_copied(self, slot: Slot) -> bool:
        """Say whether the engine is still to be told of a copy of the slot."""
        return any(isinstance(edit, CopyPrefix) and edit.src == slot.id for edit in self._edits)

    def take(self) -> tuple[Edit, ...]:
        """Hand over the edits recorded since the last call."""
        edits, self._edits = tuple(self._edits), []
        return edits

    def clear(self, slot: Slot) -> None:
        """Free a slot and forget what it held."""
        self._forget(slot)
        self._edits.append(Clear(slot.id))

    def drop_all(self, slot: Slot) -> None:
        """Drop all that a slot holds; who sits in it stays."""
        self._edits.append(Clear(slot.id))
        self._slots.cut(slot, 0)

    def cut_back(self, slot: Slot, cut: Cut) -> None:
        """Drop what a slot holds beyond a usable prefix."""
        if cut.checkpoint is not None:
            self._edits.append(Rewind(slot.id, cut.checkpoint.blob, cut.n_tokens))
            slot.is_settling = False
        elif cut.n_tokens < slot.n_held:
            self._edits.append(Truncate(slot.id, cut.n_tokens))
        self._slots.cut(slot, cut.n_tokens)

    def roll_back(self, slot: Slot, n_tokens: int) -> None:
        """Drop the rows of a rejected draft."""
        self._slots.cut(slot, n_tokens)
        slot.is_settling = self._spec.max_rollback_tokens is not None
        self._edits.append(Truncate(slot.id, n_tokens))

    def copy(self, source: Slot, slot: Slot, n_tokens: int) -> None:
        """Give an empty slot the first `n_tokens` of another."""
        self._edits.append(CopyPrefix(source.id, slot.id, n_tokens))
        self._slots.copy(source, slot, n_tokens)

    def restore(self, slot: Slot, link: Link, blob: bytes) -> None:
        """Put a known block back at the end of a slot, for which there are cells."""
        block = link.block
        edit = Restore(slot.id, block.start, blob)
        self._edits.append(edit)
        self._restored[id(edit)] = block
        self._slots.grow(slot, block.n_tokens)
        if self._spec.prefix_rule is PrefixRule.WINDOW:  # at best, until the engine says what it has
            slot.first_held = max(slot.first_held, block.end if block.is_bare else block.end - self._spec.window_tokens)
        if link.n_used < block.n_tokens:
            self._edits.append(Truncate(slot.id, link.end))
            self._slots.cut(slot, link.end)

    def settled(self, edits: Seq[Edit], results: Seq[EditResult]) -> None:
        """Take over what the engine says the slots hold after their edits; a refused checkpoint is dropped."""
        last = dict[int, EditResult]()
        for edit, result in zip(edits, results, strict=True):
            slot_id = _edited_slot(edit)
            was_ok = slot_id not in last or last[slot_id].outcome is EditOutcome.OK
            if result.outcome is EditOutcome.REFUSED and was_ok:
                if isinstance(edit, Rewind):
                    self._slots.drop_checkpoint(edit.checkpoint)
                elif isinstance(edit, Restore):
                    self._stats.n_refused_blocks += 1
                    self._tiers.refused(self._restored[id(edit)])
            last[slot_id] = result
        self._restored.clear()
        for slot_id, result in last.items():
            slot = self._slots[slot_id]
            self._slots.cut(slot, min(result.n_valid, slot.n_held))
            slot.first_held = result.first_held if slot.n_held else 0
            if not slot.n_held and self._slots.is_retained(slot):  # a refused cut emptied it
                self._forget(slot)

    def unanswered(self, edits: Seq[Edit]) -> frozenset[int]:
        """Give up edits that the engine never answered; return their slots: nobody knows what those hold."""
        self._restored.clear()
        return frozenset(map(_edited_slot, edits))

    def _forget(self, slot: Slot) -> None:
        self._index.remove(slot.id)
        self._exports.dropped(slot)
        self._slots.free(slot)


def _edited_slot(edit: Edit) -> int:
    return edit.dst if isinstance(edit, CopyPrefix) else edit.slot
