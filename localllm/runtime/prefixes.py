"""What a sequence could begin with: prefixes that slots hold or are computing, and blocks that the tiers know.

Looks, and changes nothing but the index, and what it remembers of prompts. Used by the engine's thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.runtime.cost import StepCost
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.forks import Forks
from localllm.runtime.kv.prefix_cache import PrefixCache, PrefixHit
from localllm.runtime.kv.tiers import CutRule, Link, Tiers
from localllm.runtime.sequence import Phase, RequestRun, Sequence
from localllm.runtime.slots import Cut, Slot, Slots, usable_cut


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a sequence would begin with if it were seated now: `n_device` tokens, then `links`.

    `n_held`: leading tokens that some slot holds, usable or not; `n_coming`: that a running sequence will soon have
    computed, for which this one would wait. `used_s`: when the slot was last used (monotonic seconds), None where it
    is at work.
    """

    n_device: int
    links: tuple[Link, ...]
    n_held: int
    n_coming: int
    used_s: float | None


class Prefixes:
    """Finds the longest prefix of a sequence.

    `index`, `tenants` (who sits in which slot) and `left_by` (the requests at work whose other choices have left
    theirs) are kept by `Room`, `index` by its `Edits` too.
    """

    def __init__(self, spec: EngineSpec, slots: Slots, tiers: Tiers, cost: StepCost) -> None:
        self.index = PrefixCache()
        self.tenants: dict[int, Sequence] = {}
        self.left_by: dict[int, RequestRun] = {}
        self.forks = Forks()
        self._spec = spec
        self._slots = slots
        self._tiers = tiers
        self._cost = cost

    def leader_of(self, sequence: Sequence, min_gain_tokens: int) -> Sequence | None:
        """Return the sequence whose prefill will soon hold a longer prefix of this one than anyone does now.

        Choices of one request always wait, others for `min_gain_tokens`. Where prefixes cannot be cut,
        the leader is told to stop and take a checkpoint at the fork.
        """
        leader, n_soon = self._leader(sequence, min_gain_tokens)
        if leader is not None:
            leader.cuts.add(n_soon)
        return leader

    def mark_fork(self, sequence: Sequence, min_gain_tokens: int) -> None:
        """Have a sequence that is to be seated take a checkpoint where it leaves what others began with as well.

        Where prefixes cannot be cut, the second to fork there computes it again; the third shall not.
        """
        if self._spec.prefix_rule is not PrefixRule.CHECKPOINT or sequence.run.cache == "off":
            return
        _, cut, links = self.best_start(sequence)
        n_begun = links[-1].end if links else cut.n_tokens
        n_known = self.forks.find(sequence.run.root, sequence.tokens)
        n_common = max(n_known, *(hit.n_common for hit in self._hits(sequence)), 0)
        fork = self._aligned(min(n_common, self._n_reusable(sequence)))
        if fork - n_begun >= min_gain_tokens:
            sequence.cuts.add(fork)
        if n_known < sequence.n_prompt:
            self.forks.add(sequence.run.root, sequence.tokens[: sequence.n_prompt])

    def prospect(self, sequence: Sequence, min_gain_tokens: int) -> Prospect:
        """Return what a sequence would begin with, changing nothing."""
        source, cut, links = self.best_start(sequence)
        n_held = max((min(hit.n_common, self._slots[hit.slot].n_held) for hit in self._hits(sequence)), default=0)
        _, n_coming = self._leader(sequence, min_gain_tokens)
        used_s = source.used_s if source is not None and self._slots.is_retained(source) else None
        return Prospect(cut.n_tokens, links, n_held, n_coming, used_s)

    def count_use(self, sequence: Sequence) -> None:
        """Tell the tiers that a sequence begins with blocks that it did not compute."""
        n_held, chain = sequence.n_computed, sequence.lookup.chain
        if not n_held or sequence.run.cache == "off" or not self._tiers.is_on:
            return
        if self._tiers.rule is CutRule.WHOLE:
            keys = [chain.whole(sequence.tokens, n_held).key]
        else:
            chain.extend(sequence.tokens)
            keys = chain.keys[: n_held // self._tiers.block_tokens]
        last = sequence.restoring[-1] if sequence.restoring and sequence.restoring[-1].end <= n_held else None
        in_part = None if last is None or last.block.key in keys[-1:] else last.block.key
        if last is not None and in_part is not None and last.n_used == last.block.n_tokens:  # a short one, had whole
            keys, in_part = [*keys, in_part], None
        self._tiers.used(keys, in_part, is_private=sequence.run.is_private)

    def best_source(self, sequence: Sequence, hits: list[PrefixHit] | None = None) -> tuple[Slot | None, Cut]:
        """Return the slot that holds the longest usable beginning of a sequence, and how much of it that is."""
        best: tuple[Slot | None, Cut] = (None, Cut(0))
        rank = (0, False, 0, 0.0)
        for hit in self._hits(sequence) if hits is None else hits:
            slot = self._slots[hit.slot]
            n_common = self._aligned(min(hit.n_common, self._n_reusable(sequence)))
            cut = usable_cut(self._spec, slot, n_common, self._slots.is_retained(slot))
            is_whole = cut.n_tokens == slot.n_held and self._slots.is_retained(slot)
            n_beside = 0 if self._spec.copy_shares_memory else slot.n_held  # a copy's cells, where it is rewound
            own = (cut.n_tokens, is_whole, -n_beside, slot.used_s)  # of equals the newest: the oldest may go
            if cut.n_tokens and own > rank:
                best, rank = (slot, cut), own
        return best

    def best_start(self, sequence: Sequence) -> tuple[Slot | None, Cut, tuple[Link, ...]]:
        """Return the slot to begin from, how much of it, and what to put back after that."""
        source, cut = self.best_source(sequence)
        known = self._known(sequence)
        links = tuple(link for link in known if link.end > cut.n_tokens)
        if not links:
            return source, cut, ()
        origin, begun = self._cut_to(source, cut, links[0].block.start)
        links = links if begun.n_tokens else known
        n_put, n_saved = sum(link.block.n_tokens for link in links), links[-1].end - cut.n_tokens
        if not self._cost.restore_pays(n_put, n_saved, self._slots.used_cells):
            return source, cut, ()
        return origin, begun, links

    def _cut_to(self, source: Slot | None, cut: Cut, start: int) -> tuple[Slot | None, Cut]:
        """Return what is left of a slot's beginning where something is put back from `start` on; none if it cannot."""
        if source is None or start in (0, cut.n_tokens):
            return (source, cut) if start else (None, Cut(0))
        shorter = usable_cut(self._spec, source, start, self._slots.is_retained(source))
        return (source, shorter) if shorter.n_tokens == start else (None, Cut(0))

    def _leader(self, sequence: Sequence, min_gain_tokens: int) -> tuple[Sequence | None, int]:
        """Return whom a sequence waits for, and how long the prefix is that it waits for."""
        hits = self._hits(sequence)
        n_device = self.best_source(sequence, hits)[1].n_tokens
        for hit in hits:
            leader = self.tenants.get(hit.slot)
            n_soon = self._aligned(min(hit.n_common, self._n_reusable(sequence)))
            if leader is None or leader.phase not in (Phase.PREFILL, Phase.RESTORING) or n_soon <= leader.n_computed:
                continue
            n_worth = 1 if leader.run is sequence.run else min_gain_tokens
            if n_soon - n_device < n_worth:
                continue
            n_put = leader.links[-1].end if leader.links else 0
            if n_soon < n_put and self._spec.prefix_rule is not PrefixRule.ANY:
                continue  # what is put back beyond the fork could not be cut there
            links = self.best_start(sequence)[2]
            shares_restore = min(n_soon, n_put) - n_device >= n_worth  # a copy costs no second set of cells
            if shares_restore or not links or n_soon - links[-1].end >= n_worth:
                return leader, n_soon
        return None, 0

    def n_shareable(self, sequence: Sequence) -> int:
        """Return how many of its tokens others may take from a sequence, once they are computed."""
        return self._n_reusable(sequence) if self._spec.cut_tokens else sequence.n_tokens

    def n_kept(self, sequence: Sequence) -> int:
        """Return how many of the tokens that its slot holds may serve others once it has ended."""
        return self._aligned(min(sequence.n_computed, self.n_shareable(sequence)))

    def _hits(self, sequence: Sequence) -> list[PrefixHit]:
        """Return the slots that hold a prefix of the sequence and may serve it."""
        return [hit for hit in self.index.match(sequence.run.root, sequence.tokens) if self._may_serve(hit, sequence)]

    def _may_serve(self, hit: PrefixHit, sequence: Sequence) -> bool:
        """Say whether a slot's prefix is for this sequence: what wants nothing kept serves its own request alone."""
        tenant = self.tenants.get(hit.slot)
        run = self.left_by.get(hit.slot) if tenant is None else tenant.run
        return run is sequence.run or (sequence.run.reuse_prefix and (run is None or run.cache != "off"))

    def _known(self, sequence: Sequence) -> tuple[Link, ...]:
        """Return what the tiers know of a sequence, as far as it may be used."""
        if not sequence.run.reuse_prefix or not self._tiers.is_on:
            return ()
        links = self._tiers.match(sequence.lookup, sequence.tokens, self._n_reusable(sequence))
        if self._spec.cut_tokens:  # whole blocks up to a cut: what lies between two cuts was computed otherwise
            end = self._aligned(links[-1].end if links else 0)
            links = tuple(link for link in links if link.end <= end)
        return links

    def _n_reusable(self, sequence: Sequence) -> int:
        """Return how many of its tokens a sequence may take from elsewhere: one at least is left to run."""
        if self._spec.cut_tokens:
            return self._aligned(min(sequence.n_prompt, sequence.n_tokens) - 1)
        return sequence.n_tokens - 1

    def _aligned(self, n_tokens: int) -> int:
        """Return how many of the first `n_tokens` may be reused on an engine that is bit-exact only at its cuts."""
        return n_tokens // self._spec.cut_tokens * self._spec.cut_tokens if self._spec.cut_tokens else n_tokens
