"""Our envelope around llama.cpp's state bytes: nothing unverified reaches native code.

A mutated state is not always refused by llama.cpp (`native.md`), so every blob carries what it
is, which engine made it, which positions it holds, and a checksum of its payload.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

_MAGIC = b"LLKV"
_VERSION = 1
_HEADER = struct.Struct("<4sBB2x16sIIQ")  # magic, version, kind, fingerprint, start, end, length of the payload
_CHECKSUM = struct.Struct("<Q")  # of the header before it and the payload after it
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


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


def seal(buffer: bytearray, kind: BlobKind, engine_digest: bytes, start: int, end: int) -> bytes:
    """Write the header into the first HEADER_BYTES of `buffer`, whose rest is the payload."""
    n_bytes = len(buffer) - HEADER_BYTES
    _HEADER.pack_into(buffer, 0, _MAGIC, _VERSION, kind, engine_digest, start, end, n_bytes)
    _CHECKSUM.pack_into(buffer, _HEADER.size, _checksum(memoryview(buffer)))
    return bytes(buffer)


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
    if n_bytes != len(payload) or _CHECKSUM.unpack_from(blob, _HEADER.size)[0] != _checksum(view):
        raise BadBlob("damaged")
    return Blob(kind, start, end, payload)


def _checksum(blob: memoryview) -> int:
    state = xxhash.xxh3_64(blob[: _HEADER.size])
    state.update(blob[HEADER_BYTES:])
    return int(state.intdigest())
