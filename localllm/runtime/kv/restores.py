"""Puts known prefixes back into the slots of sequences that were seated for it, as much a step as others can bear."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from localllm.runtime.cost import StepCost
from localllm.runtime.kv.tiers import Gone, Tiers
from localllm.runtime.room import Room
from localllm.runtime.sequence import Phase, Sequence

_STREAM_SHARE = 0.05  # of the step that running streams take anyway; reading beside it costs as much again
_ALONE_S = 0.25  # a step while nobody decodes, so that cancel stays quick
_FIRST_BLOCKS = 4  # a step beside streams, while nothing is known of this machine
_FIRST_BLOCKS_ALONE = 16  # the same, while nobody decodes
_PATIENCE_S = 2.0  # that a block is waited for while the disk gives nothing: one that hangs must not hang requests


class Restores:
    """The restoring part of a plan. Mutated by the engine's thread alone."""

    def __init__(self, room: Room, tiers: Tiers, cost: StepCost) -> None:
        self._room = room
        self._tiers = tiers
        self._cost = cost

    def plan(self, running: Seq[Sequence]) -> list[Sequence]:
        """Record what is put back in the next step, and return whose; who has all goes on to compute the rest."""
        restoring = [s for s in running if s.phase is Phase.RESTORING]
        if not restoring or self._room.has_text:  # it has the slot that a block goes through
            return []
        at_work = list[Sequence]()
        n_left = self._n_tokens([s for s in running if s.phase is Phase.DECODE])
        for sequence in restoring:
            while sequence.links and n_left > 0:
                n_put = self._next_block(sequence)
                if n_put is None:
                    break
                n_left -= n_put
                at_work.append(sequence)
            if not sequence.links:
                self._finish(sequence)
        return at_work

    def settle(self, running: Seq[Sequence]) -> None:
        """Let those compute whose slots the engine left shorter than was planned."""
        for sequence in running:
            links = sequence.links
            if sequence.phase is Phase.RESTORING and links and links[0].block.start != sequence.n_computed:
                sequence.links = ()
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Let a sequence compute what is left."""
        sequence.phase = Phase.PREFILL
        self._tiers.forget(sequence.lookup)

    def _give_up(self, sequence: Sequence) -> None:
        """Have a sequence compute what cannot be had, and that kept as if nobody had it."""
        self._tiers.lost([link.block.key for link in sequence.links])
        sequence.cuts.add(sequence.links[-1].end)  # where a state was kept, one is of use again
        sequence.links = ()

    def _n_tokens(self, decoding: Seq[Sequence]) -> int:
        """Return how many tokens may be put back in a step; at least a block is."""
        if self._room.spec.joins_blocks:
            return self._room.spec.pool_tokens
        per_token_s = self._cost.restore_s(1)
        if not decoding:
            n_most = self._tiers.block_tokens * _FIRST_BLOCKS_ALONE
            return max(1, int(_ALONE_S / per_token_s)) if per_token_s else n_most
        step_s = self._cost.estimate_s(len(decoding), self._room.slots.used_cells)
        if not per_token_s or step_s is None:
            return self._tiers.block_tokens * _FIRST_BLOCKS
        return max(1, int(_STREAM_SHARE * step_s / per_token_s))

    def _next_block(self, sequence: Sequence) -> int | None:
        """Record the next block's restore; return its tokens, None where there is nothing to put back now."""
        link = sequence.links[0]
        try:
            blob = self._tiers.take(sequence.lookup, link)
        except Gone:
            self._give_up(sequence)
            return None
        if blob is None:
            if self._tiers.waited_s(sequence.lookup) > _PATIENCE_S:
                self._give_up(sequence)
            return None
        if not self._room.restore(sequence, link, blob):
            sequence.links = ()
            return None
        sequence.links = sequence.links[1:]
        return link.block.n_tokens
