"""Cuts and joins the bytes of a sequence's state by cells, where native code can only give and take it whole.

A state is a head, then per cache a number of streams, and of the one stream that has the sequence's cells: their
number, their positions, and per layer a row of K (and of V) a cell. Source: llama.cpp's
`llama_kv_cache::state_write`. Whatever does not read like that to its last byte is refused.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_U32, _PAIR, _ROWS = struct.Struct("<I"), struct.Struct("<II"), struct.Struct("<iQ")
_MAGIC_BYTES, _SLOT_BYTES = 4, 4  # the head: the slot that a state was taken from says nothing of where it goes
_CELL_BYTES = 12  # position, number of sequences (1), sequence
_MOST_STREAMS = 256  # LLAMA_MAX_SEQ


class UnknownLayout(ValueError):
    """The bytes are not laid out as this module knows them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a state: `fixed` bytes, or else `cell_bytes` for each cell from `start` on.

    With neither it is the frame of a cache: where its streams and their cells are counted, or its end.
    """

    fixed: bytes = b""
    start: int = 0
    cell_bytes: int = 0
    is_end: bool = False

    @property
    def kind(self) -> tuple[bytes, int, bool]:
        """What is equal in all states of one engine."""
        return self.fixed, self.cell_bytes, self.is_end


@dataclass(frozen=True, slots=True)
class Cells:
    """A state's bytes, taken apart: `n_cells` in each of its caches, of positions `first`, first + 1, ..."""

    state: memoryview
    parts: tuple[_Part, ...]
    first: int
    n_cells: int
    n_streams: int

    @classmethod
    def read(cls, state: memoryview, *, has_v: bool) -> Cells:
        """Take a state apart; `has_v` False: the model reads V out of K. Raises: UnknownLayout."""
        try:
            reading = _Reading(state)
            while reading.at < len(state):
                reading.cache(has_v=has_v)
        except struct.error:
            raise UnknownLayout("too short") from None
        if not reading.n_cells:
            raise UnknownLayout("no cells")
        return cls(state, tuple(reading.parts), reading.first, reading.n_cells, reading.n_streams)

    def cut(self, start: int, end: int) -> list[bytes | memoryview]:
        """Return the state of cells [start, end) alone, in a single stream, in parts."""
        return _parts([(self, start, end)], 1)


def join(pieces: Sequence[Cells], n_streams: int) -> bytes:
    """Return the state of the cells of all pieces, one after another. Raises: UnknownLayout where they do not fit."""
    kinds = [part.kind for part in pieces[0].parts]
    if any([part.kind for part in piece.parts] != kinds for piece in pieces[1:]):
        raise UnknownLayout("states of different caches")
    if any(piece.first != before.first + before.n_cells for before, piece in itertools.pairwise(pieces)):
        raise UnknownLayout("states that do not follow each other")
    return b"".join(_parts([(piece, 0, piece.n_cells) for piece in pieces], n_streams))


def _parts(pieces: Sequence[tuple[Cells, int, int]], n_streams: int) -> list[bytes | memoryview]:
    n_cells = sum(end - start for _, start, end in pieces)
    counts, empty = _PAIR.pack(n_streams, n_cells), bytes(_U32.size * (n_streams - 1))
    chunks = list[bytes | memoryview]()
    for index, part in enumerate(pieces[0][0].parts):
        if part.cell_bytes:
            for piece, start, end in pieces:
                base = piece.parts[index].start
                chunks.append(piece.state[base + start * part.cell_bytes : base + end * part.cell_bytes])
        else:
            chunks.append(part.fixed or (empty if part.is_end else counts))
    return chunks


class _Reading:
    """Walks through a state. `parts` so far; `at` is the next byte."""

    def __init__(self, state: memoryview) -> None:
        self.parts: list[_Part] = []
        self.first = -1
        self.n_cells = 0
        self.n_streams = 0
        self.at = 0
        self._state = state
        self._fixed(_MAGIC_BYTES)
        self.at += _SLOT_BYTES
        self.parts.append(_Part(bytes(_SLOT_BYTES)))

    def cache(self, *, has_v: bool) -> None:
        """Read one cache: streams of which exactly one has cells, of this sequence."""
        self.n_streams = self._u32()
        if not 0 < self.n_streams <= _MOST_STREAMS:
            raise UnknownLayout("streams")
        n_held = 0
        for _ in range(self.n_streams):
            n_cells = self._u32()
            if n_cells:
                self._stream(n_cells, has_v=has_v)
                n_held += 1
        if n_held != 1:
            raise UnknownLayout("cells in several streams, or in none")
        self.parts.append(_Part(is_end=True))

    def _stream(self, n_cells: int, *, has_v: bool) -> None:
        if n_cells != (self.n_cells or n_cells):
            raise UnknownLayout("caches of different lengths")
        self.n_cells = n_cells
        self.parts.append(_Part())
        start = self.at
        self._rows(_CELL_BYTES)
        self._positions(start)
        v_is_transposed, n_layers = _PAIR.unpack_from(self._state, self.at)
        if v_is_transposed:
            raise UnknownLayout("V by columns")
        self._fixed(_PAIR.size)
        for _ in range(n_layers * (2 if has_v else 1)):
            _, row_bytes = _ROWS.unpack_from(self._state, self.at)
            self._fixed(_ROWS.size)
            self._rows(row_bytes)

    def _positions(self, start: int) -> None:
        """Check that the cells are in the order of their tokens, without gaps, as all that cuts and joins relies on."""
        cells = np.frombuffer(self._state[start : self.at], "<i4").reshape(-1, 3)
        first = int(cells[0, 0])
        if (self.first >= 0 and first != self.first) or (cells[:, 1] != 1).any():
            raise UnknownLayout("caches of other positions, or cells of several sequences")
        if first < 0 or not np.array_equal(cells[:, 0], np.arange(first, first + len(cells))):
            raise UnknownLayout("cells that do not follow each other")
        self.first = first

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._state, self.at)
        self.at += _U32.size
        return int(value)

    def _fixed(self, n_bytes: int) -> None:
        fixed = bytes(self._state[self.at : self.at + n_bytes])
        self.at += n_bytes
        if self.at > len(self._state):
            raise UnknownLayout("too short")
        self.parts.append(_Part(fixed))

    def _rows(self, row_bytes: int) -> None:
        start, self.at = self.at, self.at + self.n_cells * row_bytes
        if row_bytes == 0 or self.at > len(self._state):
            raise UnknownLayout("too short")
        self.parts.append(_Part(b"", start, row_bytes))
