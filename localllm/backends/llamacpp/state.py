"""Our envelope around llama.cpp's state bytes: nothing unverified reaches native code.

A mutated state is not always refused by llama.cpp (`native.md`), so every blob carries what it
is, which engine made it, which positions it holds, and a checksum of its payload.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

_MAGIC = b"LLKV"
_VERSION = 1
_HEADER = struct.Struct("<4sBB2x16sIIQ")  # magic, version, kind, fingerprint, start, end, length of the payload
_CHECKSUM = struct.Struct("<Q")  # of the header before it and the payload after it
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NEW_BYTES = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class BadBlob(ValueError):
    """The bytes are not a state that this engine made, or no longer are."""


class BlobKind(IntEnum):
    """What the payload restores."""

    POSITIONS = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True)
class Blob:
    """A verified state: `payload` for positions [start, end)."""

    kind: BlobKind
    start: int
    end: int
    payload: memoryview


def digest(fingerprint: str) -> bytes:
    """Return the 16 bytes that stand for an engine's fingerprint in its blobs."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()


def unwritten(n_bytes: int) -> tuple[bytes, int]:
    """Return bytes that are still to be written, two or more, and their address.

    Python's C interface allows that as long as nobody else has seen them. A bytearray would cost two passes
    over what may be gigabytes: it begins as zeros, and has to be copied in the end.
    """
    room: bytes = _NEW_BYTES(None, n_bytes)
    return room, address_of(room)


def address_of(data: bytes) -> int:
    """Return where the bytes lie, as long as they live."""
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    return address


def seal(room: bytes, kind: BlobKind, engine_digest: bytes, start: int, end: int) -> bytes:
    """Write the header into the first HEADER_BYTES of `room`, whose rest is the payload, and return it.

    It must come from `unwritten`, and nobody else may have seen it yet.
    """
    header = _HEADER.pack(_MAGIC, _VERSION, kind, engine_digest, start, end, len(room) - HEADER_BYTES)
    checksum = _CHECKSUM.pack(_checksum(header, (memoryview(room)[HEADER_BYTES:],)))
    ctypes.memmove(address_of(room), header + checksum, HEADER_BYTES)
    return room


def seal_parts(
    parts: Sequence[bytes | memoryview], kind: BlobKind, engine_digest: bytes, start: int, end: int
) -> bytes:
    """Return the blob whose payload is `parts`, one after another."""
    n_bytes = sum(map(len, parts))
    header = _HEADER.pack(_MAGIC, _VERSION, kind, engine_digest, start, end, n_bytes)
    return b"".join((header, _CHECKSUM.pack(_checksum(header, parts)), *parts))


def unseal(blob: bytes, kind: BlobKind, engine_digest: bytes) -> Blob:
    """Verify a blob and return its parts.

    Raises: BadBlob for anything but an intact blob of this kind made by this engine.
    """
    if len(blob) < HEADER_BYTES:
        raise BadBlob("shorter than its header")
    magic, version, found_kind, made_by, start, end, n_bytes = _HEADER.unpack_from(blob)
    view = memoryview(blob)
    payload = view[HEADER_BYTES:]
    if magic != _MAGIC or version != _VERSION or found_kind != kind:
        raise BadBlob("not a state of this kind and version")
    if made_by != engine_digest:
        raise BadBlob("made by another model, build or setting")
    checksum = _checksum(view[: _HEADER.size], (payload,))
    if n_bytes != len(payload) or _CHECKSUM.unpack_from(blob, _HEADER.size)[0] != checksum:
        raise BadBlob("damaged")
    return Blob(kind, start, end, payload)


def _checksum(header: bytes | memoryview, parts: Sequence[bytes | memoryview]) -> int:
    state = xxhash.xxh3_64(header)
    for part in parts:
        state.update(part)
    return int(state.intdigest())
