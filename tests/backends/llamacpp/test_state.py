"""Our envelope round states: what is not an intact blob of this engine never reaches native code."""

from __future__ import annotations

import pytest

from localllm.backends.llamacpp.state import (
    HEADER_BYTES,
    BadBlob,
    BlobKind,
    address_of,
    digest,
    seal,
    seal_parts,
    unseal,
    unwritten,
)

MINE = digest("this engine")
KIND = BlobKind.POSITIONS


def sealed(payload: bytes) -> bytes:
    """Seal a payload in one piece, as states come from native code."""
    import ctypes

    room, address = unwritten(HEADER_BYTES + len(payload))
    ctypes.memmove(address + HEADER_BYTES, payload, len(payload))
    return seal(room, KIND, MINE, 64, 128)


@pytest.mark.parametrize("payload", [b"", b"x", b"some state" * 1000])
def test_what_was_sealed_is_unsealed(payload: bytes) -> None:
    blob = unseal(sealed(payload), KIND, MINE)
    assert (bytes(blob.payload), blob.kind, blob.start, blob.end) == (payload, KIND, 64, 128)


def test_parts_are_sealed_like_one_piece() -> None:
    assert seal_parts((b"some", memoryview(b" "), b"state"), KIND, MINE, 64, 128) == sealed(b"some state")


def test_sealing_makes_no_second_copy() -> None:
    room, address = unwritten(HEADER_BYTES + 100_000)
    blob = seal(room, KIND, MINE, 0, 1)
    assert blob is room
    assert address_of(blob) == address
    payload = unseal(blob, KIND, MINE).payload
    assert payload.obj is blob


def test_bytes_yet_to_be_written_are_new_ones() -> None:
    rooms = [unwritten(HEADER_BYTES) for _ in range(9)]
    assert len({address for _, address in rooms}) == 9
    assert all(len(room) == HEADER_BYTES for room, _ in rooms)


@pytest.mark.parametrize("at", [0, 4, 5, 8, 24, 28, 32, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_any_bit_that_differs_is_found(at: int) -> None:
    blob = bytearray(sealed(b"some state"))
    blob[at] ^= 1
    with pytest.raises(BadBlob):
        unseal(bytes(blob), KIND, MINE)


@pytest.mark.parametrize("n_bytes", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9])
def test_what_is_cut_short_is_refused(n_bytes: int) -> None:
    with pytest.raises(BadBlob):
        unseal(sealed(b"some state")[:n_bytes], KIND, MINE)


def test_what_is_longer_or_for_others_is_refused() -> None:
    blob = sealed(b"some state")
    for other, kind, made_by in (
        (blob + b"x", KIND, MINE),
        (blob, BlobKind.CHECKPOINT, MINE),
        (blob, KIND, digest("another engine")),
    ):
        with pytest.raises(BadBlob):
            unseal(other, kind, made_by)
