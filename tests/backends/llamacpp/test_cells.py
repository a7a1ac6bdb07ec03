"""States are cut and joined by cells exactly, and what is laid out in another way is refused, never guessed at."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.backends.llamacpp.cells import Cells, UnknownLayout, join

K_ROW, V_ROW, N_LAYERS = 34, 68, 2


def state(
    start: int,
    end: int,
    *,
    n_streams: int = 3,
    stream: int = 1,
    slot: int = 1,
    n_caches: int = 1,
    has_v: bool = True,
    k_row: int = K_ROW,
) -> bytes:
    """Return a state as llama.cpp writes it, of positions [start, end), whose rows tell which they are."""
    parts = [b"MAGI", struct.pack("<I", slot)]
    for cache in range(n_caches):
        parts.append(struct.pack("<I", n_streams) + bytes(4 * stream))
        parts.append(struct.pack("<I", end - start))
        parts += [struct.pack("<iIi", position, 1, slot) for position in range(start, end)]
        parts.append(struct.pack("<II", 0, N_LAYERS))
        for name, row_bytes in (("k", k_row), ("v", V_ROW)) if has_v else (("k", k_row),):
            for layer in range(N_LAYERS):
                parts.append(struct.pack("<iQ", 8, row_bytes))
                for position in range(start, end):
                    parts.append(random.Random(f"{cache}{name}{layer}{position}").randbytes(row_bytes))
        parts.append(bytes(4 * (n_streams - stream - 1)))
    return b"".join(parts)


def cells(data: bytes, *, has_v: bool = True) -> Cells:
    return Cells.read(memoryview(data), has_v=has_v)


def cut(data: bytes, start: int, end: int, *, has_v: bool = True) -> bytes:
    return b"".join(cells(data, has_v=has_v).cut(start, end))


@given(
    ends=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted),
    stream=st.integers(0, 2),
    n_caches=st.integers(1, 2),
    has_v=st.booleans(),
)
def test_what_is_cut_and_joined_is_as_it_was(ends: list[int], stream: int, n_caches: int, has_v: bool) -> None:
    whole = state(0, ends[-1], stream=stream, slot=stream, n_caches=n_caches, has_v=has_v)
    pieces = [cut(whole, start, end, has_v=has_v) for start, end in zip([0, *ends], ends, strict=False)]
    expected = state(0, ends[-1], n_streams=5, stream=0, slot=0, n_caches=n_caches, has_v=has_v)
    joined = join([cells(piece, has_v=has_v) for piece in pieces], 5)
    assert _without_slots(cells(joined, has_v=has_v)) == _without_slots(cells(expected, has_v=has_v))


def test_a_piece_is_the_same_from_whatever_slot() -> None:
    one, other = state(0, 20, stream=0, slot=0), state(0, 20, n_streams=7, stream=4, slot=0)
    assert cut(one, 8, 16) == cut(other, 8, 16)


def test_pieces_of_other_caches_are_not_joined() -> None:
    for other in (state(10, 20, k_row=36), state(10, 20, n_caches=2)):
        with pytest.raises(UnknownLayout):
            join([cells(state(0, 10)), cells(other)], 3)


def test_no_prefix_of_a_state_and_nothing_longer_is_one() -> None:
    whole = state(0, 3, n_streams=1, stream=0)
    for n_bytes in range(len(whole)):
        with pytest.raises(UnknownLayout):
            cells(whole[:n_bytes])
    with pytest.raises(UnknownLayout):
        cells(whole + b"\0")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read_within_bounds(data: bytes) -> None:
    try:
        found = cells(data)
    except UnknownLayout:
        return
    assert sum(len(part) for part in found.cut(0, found.n_cells)) <= len(data) + 4


def test_columns_of_v_and_cells_in_several_streams_are_refused() -> None:
    columns = bytearray(state(0, 2, n_streams=1, stream=0))
    at = 8 + 4 + 4 + 2 * 12
    columns[at : at + 4] = struct.pack("<I", 1)
    with pytest.raises(UnknownLayout):
        cells(bytes(columns))
    one = state(0, 2, n_streams=1, stream=0)[12:]
    with pytest.raises(UnknownLayout):
        cells(b"MAGI" + struct.pack("<II", 0, 2) + one + one)


def test_cells_that_are_not_in_the_order_of_their_tokens_are_refused() -> None:
    """What is cut and joined by cells would else be another token's, and nobody would notice."""
    whole, at = state(0, 6, n_streams=1, stream=0), 8 + 4 + 4
    for n, field, value in ((2, 0, 3), (0, 0, 5), (5, 0, 7), (0, 0, -1), (1, 4, 2)):
        spoilt = bytearray(whole)
        spoilt[at + 12 * n + field : at + 12 * n + field + 4] = struct.pack("<i", value)
        with pytest.raises(UnknownLayout):
            cells(bytes(spoilt))
    swapped = bytearray(whole)
    swapped[at : at + 12], swapped[at + 12 : at + 24] = whole[at + 12 : at + 24], whole[at : at + 12]
    with pytest.raises(UnknownLayout, match="follow"):
        cells(bytes(swapped))


def test_pieces_that_do_not_follow_each_other_are_not_joined() -> None:
    for other in (state(0, 10), state(11, 20), state(9, 20)):
        with pytest.raises(UnknownLayout, match="follow"):
            join([cells(state(0, 10)), cells(other)], 3)


def _without_slots(found: Cells) -> bytes:
    """Return a state without the slot's number in each cell, which native code reads and drops."""
    n_cells, kept = found.n_cells, []
    for part in found.parts:
        if part.cell_bytes == 12:
            rows = [found.state[part.start + 12 * n : part.start + 12 * n + 8] for n in range(n_cells)]
            kept.append(b"".join(bytes(row) for row in rows))
        elif part.cell_bytes:
            kept.append(bytes(found.state[part.start : part.start + n_cells * part.cell_bytes]))
        else:
            kept.append(part.fixed)
    return b"".join([*kept, struct.pack("<I", found.n_streams)])
