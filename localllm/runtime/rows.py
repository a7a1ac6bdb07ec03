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
from localllm.runtime.types import Tokens


class RowPlanner:
    """Packs sequences' next rows. Evicts what is retained for them, and changes nothing else."""

    def __init__(self, spec: EngineSpec, room: Room, chunks: ChunkPolicy) -> None:
        self._spec = spec
        self._room = room
        self._chunks = chunks

    def decode(self, decoding: Seq[Sequence], drafts: Mapping[Sequence, Draft]) -> list[PlannedItem] | None:
        """One row for every decoding sequence, with its draft; None = there are not enough cells."""
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

    def _item(self, sequence: Sequence, tokens: Tokens, n_logits: int, draft: Draft = NO_DRAFT) -> PlannedItem:
        """Pack rows; a chunk that ends at a cut asks for a checkpoint there."""
        assert sequence.slot is not None
        start, is_prefill = sequence.n_computed, sequence.phase is Phase.PREFILL
        at_cut = n_logits == 0 and start + len(tokens) in sequence.cuts
        takes_checkpoint = at_cut and self._spec.prefix_rule is PrefixRule.CHECKPOINT
        return PlannedItem(
            sequence, BatchItem(sequence.slot.id, start, tokens, n_logits), is_prefill, draft, takes_checkpoint
        )
