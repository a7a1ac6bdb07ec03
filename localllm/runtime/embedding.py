"""Texts to embed: one at a time on the spare slot, a chunk between two steps, so that streams keep their pace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import EngineError
from localllm.runtime import events
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.engine import EmbedChunk, EngineSpec
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.room import Room
from localllm.runtime.sequence import Embedding, RequestRun

_FLOOR_SHARE = 4  # of a prefill's floor: texts may take all day, but fewer rows would hardly cost less


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The rows of a text that run next. `expected_s`: None while nothing is known of this machine."""

    embedding: Embedding
    chunk: EmbedChunk
    expected_s: float | None

    @property
    def run(self) -> RequestRun:
        """The request that the text belongs to."""
        return self.embedding.run


class EmbedSeat:
    """The spare slot and the request that sits there. Mutated by the engine's thread alone."""

    def __init__(self, spec: EngineSpec, config: RuntimeConfig, room: Room, stats: RuntimeStats) -> None:
        self.sitter: Embedding | None = None
        self._spec = spec
        self._config = config
        self._room = room
        self._stats = stats
        self._cost = StepCost()  # its rows cost more than a prefill's: all of them give output

    def seat(self, embedding: Embedding) -> bool:
        """Begin the next text of a request; False = the seat is taken, or there are no cells for it."""
        if self.sitter is not None or not self._room.fits_text(len(embedding.text)):
            return False
        self.sitter = embedding
        embedding.n_computed = 0
        self._room.seat_text(len(embedding.text))
        return True

    def make_room(self, n_rows: int) -> None:
        """Evict for the next chunk, before the edits of a step of `n_rows` rows go to the engine."""
        if self.sitter is not None:
            n_left = len(self.sitter.text) - self.sitter.n_computed
            self._room.free_up(n_rows + min(n_left, self._spec.max_embed_rows))

    def plan(self, n_decoding: int, spent_s: float) -> PlannedChunk | None:
        """Return the next chunk; None = nobody sits here, or there is no room now.

        `spent_s`: what the step of the `n_decoding` sequences, which wait meanwhile, has taken so far.
        """
        embedding = self.sitter
        if embedding is None or not self._room.edits.is_empty:  # the spare slot may still be to be cleared
            return None
        text, start = embedding.text, embedding.n_computed
        n_rows = min(len(text) - start, self._rows(n_decoding, spent_s), self._room.slots.free_cells - n_decoding)
        if n_rows < 1:
            return None
        chunk = EmbedChunk(start, text[start : start + n_rows], start + n_rows == len(text))
        return PlannedChunk(embedding, chunk, self._cost.estimate_s(n_rows, self._room.slots.used_cells))

    def commit(self, planned: PlannedChunk, vector: NDArray[np.float32] | None, elapsed_s: float) -> bool:
        """Take note that a chunk ran; True = its text is done, its embedding told, and the seat free.

        Raises: EngineError where the vector has no direction.
        """
        embedding, n_rows = planned.embedding, len(planned.chunk.tokens)
        self._cost.observe(n_rows, self._room.slots.used_cells, elapsed_s)
        self._room.slots.grow(self._room.slots.spare, n_rows)
        embedding.n_computed += n_rows
        self._stats.n_embedded_tokens += n_rows
        if vector is None:
            return False
        embedding.run.outbox.append(events.Embedded(embedding.index, unit_bytes(vector)))
        embedding.index += 1
        self._stats.n_embedded_texts += 1
        self._room.vacate_text(is_cleared=True)
        self.sitter = None
        return True

    def leave(self) -> Embedding | None:
        """Give up the text at work and return its request; it would begin that text anew."""
        embedding, self.sitter = self.sitter, None
        if embedding is not None:
            self._room.vacate_text(is_cleared=False)
        return embedding

    def _rows(self, n_decoding: int, spent_s: float) -> int:
        """Return the rows that fit in the time: what is left of the ITL target, or a quarter of the whole step."""
        config, cells, cap = self._config, self._room.slots.used_cells, self._spec.max_embed_rows
        if not n_decoding:
            return self._cost.rows_within(config.prefill_target_s, cells, cap, cap)
        least = min(max(1, config.min_chunk_tokens // _FLOOR_SHARE), cap)
        floor = max(least, self._cost.rows_within(spent_s / 3, cells, cap, 0))
        rows = self._cost.rows_within(config.itl_target_s - spent_s, cells, cap, floor)
        self._stats.n_floor_chunks += rows < floor
        return max(floor, rows)


def unit_bytes(vector: NDArray[np.float32]) -> bytes:
    """Return a vector [n_embd] with length 1, as float32, little-endian; zeros stay.

    Raises: EngineError for what is not numbers.
    """
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not np.isfinite(length):
        raise EngineError("The model gave an embedding that is not numbers.", "localllm doctor")
    return (wide / length if length else wide).astype("<f4").tobytes()
