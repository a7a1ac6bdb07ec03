"""How many rows a step may have: by time for prefill chunks, by the engine's limits for drafts.

A prefill chunk beside decoding sequences is as long as fits the target for the time between two
tokens (ITL), but never under a floor, so that a newcomer always advances.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.draft.base import Draft
from localllm.runtime.engine import EngineSpec
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.sequence import Phase, Sequence

_FIRST_CHUNK_TOKENS = 128  # while nothing is known of this machine
_WORTHWHILE = 1.5  # times the floor's step, that a chunk beyond it may take
_LONE_ROW_WORTH = 0.02  # the last prompt token runs alone where that costs less of the prefill
_LONE_ROW_TOKENS = 256  # the same, while nothing is known


class ChunkPolicy:
    """Row budgets of one engine. Mutated by the engine's thread alone."""

    def __init__(self, spec: EngineSpec, config: RuntimeConfig, cost: StepCost, stats: RuntimeStats) -> None:
        self._spec = spec
        self._config = config
        self._cost = cost
        self._stats = stats
        self._cap_rows = spec.max_batch_tokens
        self._prefill_turn = False

    def turns(self, running: Seq[Sequence]) -> tuple[bool, bool]:
        """Say whether this step may decode and whether it may prefill; engines that cannot mix alternate."""
        has_prefill = any(s.phase is Phase.PREFILL for s in running)
        has_decode = any(s.phase is Phase.DECODE for s in running)
        mixes = self._spec.mixes_prefill_and_decode and self._spec.ragged_rows and not self._spec.cut_tokens
        if not (has_prefill and has_decode) or mixes:
            return True, True
        self._prefill_turn = not self._prefill_turn
        return not self._prefill_turn, self._prefill_turn

    def prefill_rows(self, n_decode_rows: int, used_cells: int) -> int:
        """Return how many prompt tokens the step may compute beside `n_decode_rows` decoding rows."""
        cap = max(0, self._cap_rows - n_decode_rows)
        if self._config.fixed_chunks:
            return min(self._config.min_chunk_tokens, cap) if n_decode_rows else cap
        if n_decode_rows == 0:
            return self._cost.rows_within(self._config.prefill_target_s, used_cells, cap, _FIRST_CHUNK_TOKENS)
        floor = max(min(self._config.min_chunk_tokens, cap), self._quarter_rows(n_decode_rows, used_cells, cap))
        rows = self._cost.rows_within(self._config.itl_target_s, used_cells, cap, floor) - n_decode_rows
        if rows >= floor:
            return rows
        self._stats.n_floor_chunks += 1
        return self._worthwhile_rows(floor, n_decode_rows, used_cells, cap)

    def _worthwhile_rows(self, floor: int, n_decode_rows: int, used_cells: int, cap: int) -> int:
        """Return the longest chunk for little more time than the floor's: where the target is missed anyway,
        fewer slow steps are better than many (64 rows take 1.3 times as long as 32 on a CPU, not twice)."""
        floor_s = self._cost.estimate_s(n_decode_rows + floor, used_cells)
        rows = floor
        while floor_s and 0 < 2 * rows <= cap:
            longer_s = self._cost.estimate_s(n_decode_rows + 2 * rows, used_cells)
            if longer_s is None or longer_s > _WORTHWHILE * floor_s:
                break
            rows *= 2
        return rows

    def _quarter_rows(self, n_decode_rows: int, used_cells: int, cap: int) -> int:
        """Return the rows that a quarter of the step's time buys."""
        decode_s = self._cost.estimate_s(n_decode_rows, used_cells) or 0.0
        return self._cost.rows_within(decode_s * 4 / 3, used_cells, cap, 0) - n_decode_rows

    def cut(self, sequence: Sequence, start: int, end: int, used_cells: int) -> int:
        """Return where a chunk [start, end) should end: at a checkpoint, or before a prompt's last token.

        The last token runs alone where that is nearly free, so that a repeat, which finds all but
        that token in the cache, sees the same batch shape and gives the same answer.
        """
        first_cut = min((c for c in sequence.cuts if start < c < end), default=None)
        if first_cut is not None:
            return first_cut
        if end == sequence.n_tokens and end - start > 1:
            is_fixed = self._config.fixed_chunks
            share = None if is_fixed else self._cost.lone_row_share(end - start, used_cells)
            if share < _LONE_ROW_WORTH if share is not None else end - start >= _LONE_ROW_TOKENS:
                return end - 1
        return end

    def exact_end(self, sequence: Sequence, start: int) -> int:
        """Return where the rows from `start` on end on an engine that is bit-exact only if they end there.

        The next cut of the prompt, or before its last token; from there on a few rows, each as if it were alone.
        """
        n_chunked = sequence.n_prompt - 1
        if start < n_chunked:
            return min((start // self._spec.cut_tokens + 1) * self._spec.cut_tokens, n_chunked)
        return min(start + self._spec.exact_rows, sequence.n_tokens)

    def drafts_that_fit(self, drafts: Mapping[Sequence, Draft], running: Seq[Sequence]) -> dict[Sequence, Draft]:
        """Return the drafts cut to what the engine can roll back and the batch can hold beside a newcomer."""
        if not self._spec.ragged_rows:
            return {}
        decoding = [s for s in running if s.phase is Phase.DECODE]
        has_prefill = any(s.phase is Phase.PREFILL for s in running)
        n_spare = self._cap_rows - len(decoding) - (self._config.min_chunk_tokens if has_prefill else 0)
        if self._spec.cut_tokens:
            n_spare = self._spec.exact_rows - len(decoding)
        fitting: dict[Sequence, Draft] = {}
        for sequence in decoding:
            draft = drafts.get(sequence)
            if draft is None:
                continue
            n_left = sequence.run.max_tokens - sequence.n_generated - 1
            limits = (n_spare, n_left, self._spec.max_sequence_tokens - sequence.n_tokens)
            rollback = self._spec.max_rollback_tokens
            draft = draft.cut(max(0, min(limits if rollback is None else (*limits, rollback))))
            if len(draft):
                fitting[sequence] = draft
                n_spare -= len(draft)
        return fitting

    def shrink(self, n_rows: int, n_items: int) -> bool:
        """Halve the rows of a step after one of `n_rows` found no room; False = no chunk that may be shorter."""
        if n_rows <= n_items or self._spec.cut_tokens:
            return False
        self._cap_rows = max(1, n_rows // 2)
        return True

    def relax(self) -> None:
        """Let chunks grow again after a step that went well."""
        self._cap_rows = min(self._spec.max_batch_tokens, self._cap_rows * 2)


def shares(prefilling: Seq[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Divide the rows of a step: equal parts for the oldest sequence of each client, what is left for the oldest.

    So one client's long prompt, or many, slow another's short one down, but do not stand before it.
    """
    first = {s.run.client: s for s in reversed(prefilling)}
    turn = sorted(prefilling, key=lambda s: (first[s.run.client] is not s, s.order))
    rows = dict.fromkeys(turn, 0)
    for n_left, sequence in zip(range(len(first), 0, -1), turn, strict=False):
        rows[sequence] = min(sequence.n_tokens - sequence.n_computed, -(-budget // n_left))
        budget -= rows[sequence]
    for sequence in turn:
        more = min(sequence.n_tokens - sequence.n_computed - rows[sequence], budget)
        rows[sequence], budget = rows[sequence] + more, budget - more
    return [(sequence, n_rows) for sequence, n_rows in rows.items() if n_rows > 0]
