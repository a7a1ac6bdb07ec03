"""Where sequences live: their slots, the prefixes those hold, and who is evicted for whom.

What the engine must hear of is changed through `edits`. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from localllm.runtime.cost import StepCost
from localllm.runtime.edits import Edits
from localllm.runtime.engine import Edit, EngineSpec
from localllm.runtime.kv.exports import Exports
from localllm.runtime.kv.tiers import Link, Tiers
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.prefixes import Prefixes
from localllm.runtime.sequence import Phase, RequestRun, Sequence
from localllm.runtime.slots import Checkpoint, Cut, Slot, Slots, keeps_window, usable_cut

_CHECKPOINTS_PER_SLOT = 4
_RETAINED_SHARE = 0.005  # of a step's time, that retained cells may cost those at work: putting them back costs less
_LONG_PREFILL_S = 0.5  # exporting 1 000 tokens takes 20 ms, and they slow a prefill by 4 %
_LONG_PREFILL_TOKENS = 256  # the same, while nothing is known of this machine


class Room:
    """Seats sequences in slots, reusing the longest held prefix, and makes room by eviction."""

    def __init__(self, spec: EngineSpec, stats: RuntimeStats, tiers: Tiers, cost: StepCost) -> None:
        self.spec = spec
        self.slots = Slots(spec)
        self.exports = Exports(spec, tiers, stats)
        self._tiers = tiers
        self._cost = cost
        self._stats = stats
        self.prefixes = Prefixes(spec, self.slots, tiers, cost)
        self._cache = self.prefixes.index
        self._tenants = self.prefixes.tenants
        self.edits = Edits(spec, self.slots, self._cache, self.exports, tiers, stats)
        self._text_tokens = 0  # of the text on the spare slot

    @property
    def has_text(self) -> bool:
        """Say whether a text to embed has the spare slot, which exporting and putting back need too."""
        return self._text_tokens > 0

    @property
    def may_export(self) -> bool:
        """Say whether the spare slot, which exporting needs, is empty for the engine too."""
        return not self.has_text and self.slots.spare.id not in self.edits.edited_slots

    def seat(self, sequence: Sequence) -> bool:
        """Give a sequence a slot with the longest prefix that some slot holds, or a tier knows; False = no slot.

        A retained slot that matches whole is taken over, any other match is copied where that costs others
        less than what a take-over drops. What only a tier has is put back in the steps that follow.
        """
        source, cut, links = self.prefixes.best_start(sequence)
        retained = source is not None and self.slots.is_retained(source)
        if source is not None and retained and self._is_taken_over(source, cut):
            slot: Slot | None = self._take_over(source, cut)
        else:
            slot = self._empty_slot(keep=source)
            if slot is not None and source is not None:
                self._copy(source, slot, cut)
            elif slot is None and source is not None and retained:
                slot = self._take_over(source, cut)
        if slot is None:
            return False
        sequence.slot = slot
        sequence.n_device = slot.n_held
        sequence.links = sequence.restoring = links if links and links[0].block.start == slot.n_held else ()
        self._tenants[slot.id] = sequence
        self._cache.insert(sequence.run.root, slot.id, sequence.tokens[: self.prefixes.n_shareable(sequence)])
        self.exports.seated(sequence)
        return True

    def restore(self, sequence: Sequence, link: Link, blob: bytes) -> bool:
        """Put a known block back at the end of a sequence's slot; False = there are no cells for it."""
        slot, block = sequence.slot, link.block
        assert slot is not None
        if slot.n_held != block.start or not self.free_up(block.n_tokens):
            return False
        self.edits.restore(slot, link, blob)
        return True

    def fits(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Say whether the whole sequence finds cells beside what runs (but those `without`), once all that
        is retained is evicted.
        """
        source, cut = self.prefixes.best_source(sequence)
        tenant = self._tenants.get(source.id) if source is not None else None
        shares = self.spec.copy_shares_memory and tenant is not None and tenant not in without
        n_needed = sequence.n_tokens + 1 - (cut.n_tokens if shares else 0)
        return self._promised_cells(without) + n_needed <= self.spec.pool_tokens

    def fits_text(self, n_tokens: int) -> bool:
        """Say whether a text of `n_tokens` finds cells beside what runs."""
        return self._promised_cells() + n_tokens <= self.spec.pool_tokens

    def seat_text(self, n_tokens: int) -> None:
        """Promise the cells of a text that is to be embedded on the spare slot, and evict for them.

        Before the text is there: what goes later cannot be exported first.
        """
        self.free_up(n_tokens)
        self._text_tokens = n_tokens

    def vacate_text(self, *, is_cleared: bool) -> None:
        """Free the cells of the text on the spare slot; the engine is told to, unless it has cleared it."""
        self._text_tokens = 0
        if is_cleared:
            self.slots.free(self.slots.spare)
        else:
            self.edits.clear(self.slots.spare)

    def free_up(self, n_cells: int) -> bool:
        """Evict retained slots, the least recently used first, until `n_cells` are free."""
        while self.slots.free_cells < n_cells:
            if not self.evict_one():
                return False
        return True

    def note_refusal(self) -> None:
        """Keep how full the pool was when room was first short."""
        if self._stats.pool_use_at_first_refusal is None:
            self._stats.pool_use_at_first_refusal = self.slots.used_cells / self.spec.pool_tokens

    def evict_one(self, keep: Slot | None = None) -> bool:
        """Give up the least recently used retained slot (not `keep`); False = there is none."""
        victim = next((slot for slot in self.slots.retained() if slot is not keep), None)
        if victim is None:
            return False
        self._stats.n_evictions += 1
        self._rescue(victim, n_left=0)
        self.edits.clear(victim)
        return True

    def trim(self, running: Seq[Sequence]) -> None:
        """Clear retained slots that cost those at work more than their share and lie safe in a tier.

        While those compute for long without a token, as far as the debt allows, slots that do not lie safe yet
        are exported; the next call clears them.
        """
        if not self.slots.n_retained or not self._tiers.is_on:
            return
        may_export = self._has_long_prefill(running)
        n_coming, cap = 0, self._cost.cells_within(_RETAINED_SHARE)
        for slot in self.slots.retained():
            if self.slots.retained_cells - n_coming <= cap:
                break
            if not self.slots.frees_cells(slot):
                continue
            if self.exports.is_safe(slot):
                self.edits.clear(slot)
            elif may_export and self._rescue(slot):
                n_coming += slot.n_held

    def clear_retained(self) -> int:
        """Clear every retained slot, whatever is lost with it; return the cells that this frees."""
        n_used = self.slots.used_cells
        self.prefixes.forks.clear()
        for slot in self.slots.retained():
            self.edits.clear(slot)
        self.exports.cleared()
        return n_used - self.slots.used_cells

    def retire(self, sequence: Sequence) -> None:
        """Keep what a sequence's slot holds, for whoever comes with the same prefix.

        Where it wants nothing kept, for its request's other choices alone.
        """
        n_kept = self.prefixes.n_kept(sequence)
        slot = self._leave(sequence)
        if slot is not None:
            self._retain(slot, sequence, n_kept)
        self._forget_ended(sequence.run)

    def vacate(self, sequence: Sequence) -> None:
        """Empty a sequence's slot and free it; idempotent."""
        slot = self._leave(sequence)
        if slot is not None:
            self.edits.clear(slot)
        self._forget_ended(sequence.run)

    def drop_gapped(self, sequence: Sequence) -> None:
        """Have a sequence compute all of its tokens where what it began with came without a whole window at its end."""
        slot = sequence.slot
        if slot is None or keeps_window(self.spec, slot, slot.n_held):
            return
        self.edits.drop_all(slot)
        sequence.restoring, sequence.n_device = (), 0
        self.exports.seated(sequence)

    def distrust(self, edits: Seq[Edit]) -> list[Sequence]:
        """Clear the slots of edits that the engine never answered; return the sequences that sit in others."""
        slot_ids = self.edits.unanswered(edits)
        for slot_id in slot_ids - self._tenants.keys():
            self.edits.clear(self.slots[slot_id])
        return [self._tenants[slot_id] for slot_id in slot_ids & self._tenants.keys()]

    def add_checkpoint(self, slot: Slot, blob: bytes) -> None:
        """Remember the state of `slot` at its present length; the oldest beyond a few are dropped."""
        slot.checkpoints = [*slot.checkpoints, Checkpoint(slot.n_held, blob)][-_CHECKPOINTS_PER_SLOT:]

    def _promised_cells(self, without: Collection[Sequence] = ()) -> int:
        """Return the cells that running sequences and the text to embed hold, or need for the tokens they have."""
        running = [s for s in self._tenants.values() if s.slot is not None and s not in without]
        segments = {id(seg): seg.n_tokens for s in running if s.slot for seg in s.slot.segments}
        return sum(segments.values()) + sum(s.n_tokens - s.n_computed for s in running) + self._text_tokens

    def _has_long_prefill(self, running: Seq[Sequence]) -> bool:
        """Say whether those at work go on for longer without a token than it takes to export what slows them."""
        n_rows = sum(s.n_tokens - s.n_computed for s in running if s.phase is Phase.PREFILL)
        if not n_rows or any(s.phase is Phase.DECODE for s in running):
            return False
        needed_s = self._cost.estimate_s(n_rows, self.slots.used_cells)
        return n_rows >= _LONG_PREFILL_TOKENS if needed_s is None else needed_s >= _LONG_PREFILL_S

    def _rescue(self, slot: Slot, n_left: int | None = None) -> bool:
        """Have a slot exported that is to be cleared, or cut to `n_left`; False = there is nothing to, or not now."""
        n_left = None if self.edits.is_copied(slot) else n_left  # as it is, by edits that come after the export
        return not self.edits.is_unsettled(slot) and self.may_export and self.exports.rescue(slot, n_left)

    def _empty_slot(self, keep: Slot | None) -> Slot | None:
        slot = self.slots.take_free()
        if slot is None and self.evict_one(keep):
            slot = self.slots.take_free()
        return slot

    def _is_taken_over(self, source: Slot, cut: Cut) -> bool:
        """Say whether a retained slot is better taken over than copied: it matches whole, or what it drops is
        little beside what it gives and what would go for a copy, or there is no room for a copy at all.
        """
        n_dropped = source.n_held - cut.n_tokens
        if not n_dropped or source.is_settling:
            return True
        others, n_cells = [slot for slot in self.slots.retained() if slot is not source], 0
        if not self.spec.copy_shares_memory:
            n_copied = source.n_held if cut.checkpoint is not None else cut.n_tokens
            n_cells = max(0, n_copied - self.slots.free_cells)
            if n_cells > sum(slot.n_held for slot in others):
                return True
        if others and not self.slots.has_free:
            n_cells = max(n_cells, sum(segment.n_tokens for segment in others[0].segments if segment.n_holders == 1))
        return n_dropped < min(cut.n_tokens, n_cells)

    def _take_over(self, slot: Slot, cut: Cut) -> Slot:
        if cut.n_tokens < slot.n_held:
            self._rescue(slot, n_left=cut.n_tokens)
        self.slots.take_retained(slot)
        self.edits.cut_back(slot, cut)
        return slot

    def _copy(self, source: Slot, slot: Slot, cut: Cut) -> None:
        """Copy a prefix; whole and then rewound where it cannot be cut. No room for it = nothing copied."""
        n_copied = source.n_held if cut.checkpoint is not None else cut.n_tokens
        if n_copied == 0 or (not self.spec.copy_shares_memory and not self._has_room_beside(source, n_copied)):
            return
        self.edits.copy(source, slot, n_copied)
        if cut.checkpoint is not None:
            self.edits.cut_back(slot, cut)
        self.slots.touch(source)

    def _has_room_beside(self, source: Slot, n_cells: int) -> bool:
        while self.slots.free_cells < n_cells:
            if not self.evict_one(keep=source):
                return False
        return True

    def _retain(self, slot: Slot, sequence: Sequence, n_kept: int) -> None:
        """Keep the first `n_kept` tokens of a slot that a sequence has left, where they can be cut there."""
        run = sequence.run
        cut = Cut(n_kept) if n_kept == slot.n_held else usable_cut(self.spec, slot, n_kept, can_take_over=True)
        if cut.n_tokens == 0 or (run.cache == "off" and run.is_finished):
            self.edits.clear(slot)
            return
        self.edits.cut_back(slot, cut)
        self.slots.retain(slot)
        self._cache.insert(run.root, slot.id, sequence.tokens[: cut.n_tokens])
        self.prefixes.left_by[slot.id] = run
        if run.cache != "off":
            self.exports.retired(slot, sequence, cut.n_tokens)

    def _forget_ended(self, run: RequestRun) -> None:
        """Once a request has ended, keep nothing for its choices alone."""
        if run.is_finished:
            left_by = self.prefixes.left_by
            for slot_id in [slot_id for slot_id, left in left_by.items() if left is run]:
                del left_by[slot_id]
                if run.cache == "off" and self.slots.is_retained(self.slots[slot_id]):
                    self.edits.clear(self.slots[slot_id])

    def _leave(self, sequence: Sequence) -> Slot | None:
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            del self._tenants[slot.id]
        return slot
