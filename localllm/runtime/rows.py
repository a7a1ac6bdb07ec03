"""Which rows running sequences bring to a step, within the time and the room that there is."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from localllm.runtime.chunks import ChunkPolicy, shares
from localllm.runtime.draft.base import Draft
from localllm.runtime.engine import BatchItem, EngineSpec, PrefixRule
from localllm.runtime.plan import NO_DRAFT, PlannedItem
from localllm.runtime.room import Room
from localllm.runtime.sequence import Phase, Sequence
from localllm.runtime.turns import Turns
from localllm.runtime.types import Tokens


class RowPlanner:
    """Packs sequences' next rows. Evicts what is retained for them, and changes nothing else."""

    def __init__(self, spec: EngineSpec, room: Room, chunks: ChunkPolicy) -> None:
        self._spec = spec
        self._room = room
        self._chunks = chunks
        self._decoders = Turns[Sequence]()
        self._clients = Turns[str]()

    def decode(self, decoding: Seq[Sequence], drafts: Mapping[Sequence, Draft]) -> list[PlannedItem] | None:
        """One row for every decoding sequence, with its draft; None = there are not enough cells.

        Where the engine is exact for a few rows only, those whose turn it is.
        """
        if self._spec.cut_tokens:
            decoding = self._few(decoding, drafts)
        if decoding and not self._room.free_up(sum(1 + len(drafts.get(s, NO_DRAFT)) for s in decoding)):
            return None
        items = []
        for sequence in decoding:
            draft = drafts.get(sequence, NO_DRAFT)
            tokens = (sequence.tokens[-1], *draft.tokens)
            items.append(self._item(sequence, tokens, n_logits=len(tokens), draft=draft))
        return items

    def prefill(self, prefilling: Seq[Sequence], n_rows: int) -> list[PlannedItem]:
        """Chunks beside `n_rows` decoding rows: a part for each client, its oldest sequence first."""
        if not prefilling:
            return []
        if self._spec.cut_tokens:
            return self._exact_chunk(prefilling)
        slots, items = self._room.slots, list[PlannedItem]()
        for sequence, n_wanted in shares(prefilling, self._chunks.prefill_rows(n_rows, slots.used_cells)):
            start = sequence.n_computed
            self._room.free_up(n_rows + n_wanted)
            end = start + min(n_wanted, slots.free_cells - n_rows)
            if end <= start:
                continue
            end = self._chunks.cut(sequence, start, end, slots.used_cells)
            tokens = sequence.tokens[start:end]
            planned = self._item(sequence, tokens, n_logits=int(end == sequence.n_tokens))
            if items and not self._spec.mixes_prefill_and_decode and planned.is_lone_row != items[0].is_lone_row:
                continue  # a prompt's last token alone is a decode row to the engine
            items.append(planned)
            n_rows += len(tokens)
            if not self._spec.ragged_rows:
                break
        return items

    def _few(self, decoding: Seq[Sequence], drafts: Mapping[Sequence, Draft]) -> list[Sequence]:
        """Return as many as bring no more rows than the engine is exact for, who waited longest first."""
        few, n_left = list[Sequence](), self._spec.exact_rows
        for sequence in self._decoders.order(decoding):
            n_left -= 1 + len(drafts.get(sequence, NO_DRAFT))
            if few and n_left < 0:
                break
            self._decoders.take(sequence)
            few.append(sequence)
        return few

    def _exact_chunk(self, prefilling: Seq[Sequence]) -> list[PlannedItem]:
        """One whole chunk, of the oldest sequence of the client that waited longest; none where no cells are left."""
        first = dict[str, Sequence]()
        for sequence in sorted(prefilling, key=lambda s: s.order):
            first.setdefault(sequence.run.client, sequence)
        for client in self._clients.order(first):
            sequence = first[client]
            assert sequence.slot is not None
            start, cut_tokens = sequence.n_computed, self._spec.cut_tokens
            if start % cut_tokens and start < sequence.n_prompt - 1:  # what was put back came out shorter
                start -= start % cut_tokens
                self._room.edits.roll_back(sequence.slot, start)
            end = self._chunks.exact_end(sequence, start)
            if not self._room.free_up(end - start):
                continue
            self._clients.take(client)
            return [self._item(sequence, sequence.tokens[start:end], n_logits=int(end == sequence.n_tokens))]
        return []

    def _item(self, sequence: Sequence, tokens: Tokens, n_logits: int, draft: Draft = NO_DRAFT) -> PlannedItem:
        """Pack rows; a chunk that ends at a cut asks for a checkpoint there."""
        assert sequence.slot is not None
        start, is_prefill = sequence.n_computed, sequence.phase is Phase.PREFILL
        at_cut = n_logits == 0 and start + len(tokens) in sequence.cuts
        takes_checkpoint = at_cut and self._spec.prefix_rule is PrefixRule.CHECKPOINT
        return PlannedItem(
            sequence, BatchItem(sequence.slot.id, start, tokens, n_logits), is_prefill, draft, takes_checkpoint
        )
