"""Where sequences live: their slots, the prefixes those hold, and the edits that tell the engine.

Every change of the ledger is recorded as the `Edit` that makes the engine equal to it; the next
plan carries them, in order, before its rows. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from localllm.runtime.engine import Clear, CopyPrefix, Edit, EditOutcome, EditResult, EngineSpec, Rewind, Truncate
from localllm.runtime.kv.prefix_cache import PrefixCache, PrefixHit
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.sequence import Phase, Sequence
from localllm.runtime.slots import Checkpoint, Cut, Slot, Slots, usable_cut

ROOT = ("", "")  # (adapter set, isolation salt): one of each until requests can choose
_CHECKPOINTS_PER_SLOT = 4


class Room:
    """Seats sequences in slots, reusing the longest held prefix, and makes room by eviction."""

    def __init__(self, spec: EngineSpec, stats: RuntimeStats) -> None:
        self.spec = spec
        self.slots = Slots(spec)
        self._stats = stats
        self._cache = PrefixCache()
        self._tenants: dict[int, Sequence] = {}
        self._edits: list[Edit] = []
        self._text_tokens = 0  # of the text on the spare slot

    @property
    def has_edits(self) -> bool:
        """Say whether the engine is still to be told of changes."""
        return bool(self._edits)

    def take_edits(self) -> tuple[Edit, ...]:
        """Hand over the edits recorded since the last call."""
        edits, self._edits = tuple(self._edits), []
        return edits

    def seat(self, sequence: Sequence) -> bool:
        """Give a sequence a slot with the longest prefix that some slot holds; False = no slot.

        A retained slot that matches whole is taken over, any other match is copied.
        """
        source, cut = self._best_source(sequence)
        retained = source is not None and self.slots.is_retained(source)
        if source is not None and retained and cut.n_tokens == source.n_held:
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
        self._tenants[slot.id] = sequence
        self._cache.insert(ROOT, slot.id, sequence.tokens)
        return True

    def leader_of(self, sequence: Sequence, min_gain_tokens: int) -> Sequence | None:
        """Return the sequence whose prefill will soon hold a longer prefix of this one than anyone does now.

        Choices of one request always wait, others for `min_gain_tokens`. Where prefixes cannot be cut,
        the leader is told to stop and take a checkpoint at the fork.
        """
        hits = self._hits(sequence)
        n_now = self._best_source(sequence, hits)[1].n_tokens
        for hit in hits:
            leader = self._tenants.get(hit.slot)
            n_soon = min(hit.n_common, sequence.n_tokens - 1)
            if leader is None or leader.phase is not Phase.PREFILL or n_soon <= leader.n_computed:
                continue
            if n_soon - n_now >= (1 if leader.run is sequence.run else min_gain_tokens):
                leader.cuts.add(n_soon)
                return leader
        return None

    def fits(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Say whether the whole sequence finds cells beside what runs (but those `without`), once all that
        is retained is evicted.
        """
        source, cut = self._best_source(sequence)
        tenant = self._tenants.get(source.id) if source is not None else None
        shares = self.spec.copy_shares_memory and tenant is not None and tenant not in without
        n_needed = sequence.n_tokens + 1 - (cut.n_tokens if shares else 0)
        return self._promised_cells(without) + n_needed <= self.spec.pool_tokens

    def fits_text(self, n_tokens: int) -> bool:
        """Say whether a text of `n_tokens` finds cells beside what runs."""
        return self._promised_cells() + n_tokens <= self.spec.pool_tokens

    def seat_text(self, n_tokens: int) -> None:
        """Promise the cells of a text that is to be embedded on the spare slot."""
        self._text_tokens = n_tokens

    def vacate_text(self, *, is_cleared: bool) -> None:
        """Free the cells of the text on the spare slot; the engine is told to, unless it has cleared it."""
        self._text_tokens = 0
        if is_cleared:
            self.slots.free(self.slots.spare)
        else:
            self._clear(self.slots.spare)

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
        self._clear(victim)
        return True

    def retire(self, sequence: Sequence) -> None:
        """Keep what a finished sequence's slot holds, for whoever comes with the same prefix."""
        slot = self._leave(sequence)
        if slot is not None and slot.n_held > 0:
            self.slots.retain(slot)
            self._cache.insert(ROOT, slot.id, sequence.tokens[: slot.n_held])
        elif slot is not None:
            self._clear(slot)

    def vacate(self, sequence: Sequence) -> None:
        """Empty a sequence's slot and free it; idempotent."""
        slot = self._leave(sequence)
        if slot is not None:
            self._clear(slot)

    def roll_back(self, slot: Slot, n_tokens: int) -> None:
        """Drop the rows of a rejected draft."""
        self.slots.cut(slot, n_tokens)
        slot.is_settling = self.spec.max_rollback_tokens is not None
        self._edits.append(Truncate(slot.id, n_tokens))

    def settled(self, edits: Seq[Edit], results: Seq[EditResult]) -> None:
        """Take over what the engine says the slots hold after their edits; a refused checkpoint is dropped."""
        last = dict[int, EditResult]()
        for edit, result in zip(edits, results, strict=True):
            slot_id = _edited_slot(edit)
            was_ok = slot_id not in last or last[slot_id].outcome is EditOutcome.OK
            if isinstance(edit, Rewind) and result.outcome is EditOutcome.REFUSED and was_ok:
                self.slots.drop_checkpoint(edit.checkpoint)
            last[slot_id] = result
        for slot_id, result in last.items():
            slot = self.slots[slot_id]
            self.slots.cut(slot, min(result.n_valid, slot.n_held))
            slot.first_held = result.first_held if slot.n_held else 0
            if not slot.n_held and self.slots.is_retained(slot):  # a refused cut emptied it
                self._cache.remove(slot_id)
                self.slots.free(slot)

    def distrust(self, edits: Seq[Edit]) -> list[Sequence]:
        """Clear the slots of edits that the engine never answered; return the sequences that sit in others."""
        slot_ids = {_edited_slot(edit) for edit in edits}
        for slot_id in slot_ids - self._tenants.keys():
            self._clear(self.slots[slot_id])
        return [self._tenants[slot_id] for slot_id in slot_ids & self._tenants.keys()]

    def add_checkpoint(self, slot: Slot, blob: bytes) -> None:
        """Remember the state of `slot` at its present length; the oldest beyond a few are dropped."""
        slot.checkpoints = [*slot.checkpoints, Checkpoint(slot.n_held, blob)][-_CHECKPOINTS_PER_SLOT:]

    def _promised_cells(self, without: Collection[Sequence] = ()) -> int:
        """Return the cells that running sequences and the text to embed hold, or need for the tokens they have."""
        running = [s for s in self._tenants.values() if s.slot is not None and s not in without]
        segments = {id(seg): seg.n_tokens for s in running if s.slot for seg in s.slot.segments}
        return sum(segments.values()) + sum(s.n_tokens - s.n_computed for s in running) + self._text_tokens

    def _hits(self, sequence: Sequence) -> list[PrefixHit]:
        """Return the slots that hold a prefix of the sequence and may serve it."""
        hits = self._cache.match(ROOT, sequence.tokens)
        if sequence.run.reuse_prefix:
            return hits
        own = (self._tenants.get(hit.slot) for hit in hits)
        return [hit for hit, tenant in zip(hits, own, strict=True) if tenant and tenant.run is sequence.run]

    def _best_source(self, sequence: Sequence, hits: list[PrefixHit] | None = None) -> tuple[Slot | None, Cut]:
        best: tuple[Slot | None, Cut] = (None, Cut(0))
        for hit in self._hits(sequence) if hits is None else hits:
            slot = self.slots[hit.slot]
            cut = usable_cut(self.spec, slot, min(hit.n_common, sequence.n_tokens - 1), self.slots.is_retained(slot))
            is_whole = cut.n_tokens == slot.n_held and self.slots.is_retained(slot)
            if cut.n_tokens > best[1].n_tokens or (is_whole and cut.n_tokens == best[1].n_tokens > 0):
                best = (slot, cut)
        return best

    def _empty_slot(self, keep: Slot | None) -> Slot | None:
        slot = self.slots.take_free()
        if slot is None and self.evict_one(keep):
            slot = self.slots.take_free()
        return slot

    def _take_over(self, slot: Slot, cut: Cut) -> Slot:
        self.slots.take_retained(slot)
        if cut.checkpoint is not None:
            self._edits.append(Rewind(slot.id, cut.checkpoint.blob, cut.n_tokens))
        elif cut.n_tokens < slot.n_held:
            self._edits.append(Truncate(slot.id, cut.n_tokens))
        self.slots.cut(slot, cut.n_tokens)
        return slot

    def _copy(self, source: Slot, slot: Slot, cut: Cut) -> None:
        """Copy a prefix; whole and then rewound where it cannot be cut. No room for it = nothing copied."""
        n_copied = source.n_held if cut.checkpoint is not None else cut.n_tokens
        if n_copied == 0 or (not self.spec.copy_shares_memory and not self._has_room_beside(source, n_copied)):
            return
        self._edits.append(CopyPrefix(source.id, slot.id, n_copied))
        self.slots.copy(source, slot, n_copied)
        if cut.checkpoint is not None:
            self._edits.append(Rewind(slot.id, cut.checkpoint.blob, cut.n_tokens))
            self.slots.cut(slot, cut.n_tokens)
        self.slots.touch(source)

    def _has_room_beside(self, source: Slot, n_cells: int) -> bool:
        while self.slots.free_cells < n_cells:
            if not self.evict_one(keep=source):
                return False
        return True

    def _leave(self, sequence: Sequence) -> Slot | None:
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            del self._tenants[slot.id]
        return slot

    def _clear(self, slot: Slot) -> None:
        self._cache.remove(slot.id)
        self.slots.free(slot)
        self._edits.append(Clear(slot.id))


def _edited_slot(edit: Edit) -> int:
    return edit.dst if isinstance(edit, CopyPrefix) else edit.slot
