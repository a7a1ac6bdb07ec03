"""One block as one file: what it is, the marks of its tokens, its bytes, and a checksum over all.

There is no text and no token id in it. Nothing is believed before the checksum was found right.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from localllm.models.disk import files
from localllm.runtime.kv.blocks import KEY_BYTES, MARK_BYTES, Block

SUFFIX, PINNED_SUFFIX = ".kv", ".pin.kv"
PARTIAL_SUFFIX = ".kv.tmp"
"""Of a file that is being written; whoever writes it holds an flock on it, which ends with its process."""
VERSION = 1

_MAGIC = b"LLKB"
# magic, version, flags, key, parent, start, n_tokens, prefix_tokens, bytes of the marks, bytes of the payload
_HEAD = struct.Struct(f"<4sHH{KEY_BYTES}s{KEY_BYTES}sIIIIQ")
_CHECKSUM = struct.Struct("<QQ")  # of the header and the marks, and of the payload
_BARE = 1
_MAX_MARKS_BYTES = 1 << 20
_READ_FLAGS = os.O_RDONLY | files.OWN | getattr(os, "O_NONBLOCK", 0)  # a pipe in the way holds nobody up
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.OWN


class BadFile(ValueError):
    """The file is not an intact block of this version."""


class NewerFile(BadFile):
    """The file is of a later version, which still needs it."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. `prefix_tokens`: of the sequence that the block was computed for."""

    block: Block
    prefix_tokens: int
    payload_bytes: int

    @property
    def file_bytes(self) -> int:
        """How large the file must be."""
        return _HEAD.size + _CHECKSUM.size + len(self.block.marks) + self.payload_bytes


def file_parts(block: Block, blob: bytes, prefix_tokens: int) -> tuple[bytes, bytes]:
    """Return a file's content in two parts, of which the second is `blob` itself."""
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        _BARE if block.is_bare else 0,
        block.key,
        block.parent,
        block.start,
        block.n_tokens,
        prefix_tokens,
        len(block.marks),
        len(blob),
    )
    sums = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + block.marks), xxhash.xxh3_64_intdigest(blob))
    return head + sums + block.marks, blob


def write_file(path: Path, parts: tuple[bytes, ...], used_s: float) -> None:
    """Put a block's file in its place, whole or not at all, last used at `used_s` (Unix time). Raises OSError."""
    temporary = path.with_name(f".{files.token()}{PARTIAL_SUFFIX}")
    fd = os.open(temporary, _WRITE_FLAGS, 0o600)
    try:
        _own(fd)
        for part in parts:
            files.write_all(fd, part)
        os.fsync(fd)
        os.utime(fd, (used_s, used_s))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _own(fd: int) -> None:
    """Show those who sweep that the file is being written, where the system can."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)


def is_partial_left_behind(path: Path) -> bool | None:
    """Say whether nobody writes a partial file any more; None = the system cannot tell. Raises OSError."""
    import fcntl

    fd = os.open(path, _READ_FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(fd)


def read_header(path: Path) -> Header:
    """Return what a file says of itself. Raises: OSError, BadFile, NewerFile."""
    fd = os.open(path, _READ_FLAGS)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise BadFile("no regular file")
        return _header(os.read(fd, _HEAD.size + _CHECKSUM.size), fd, facts.st_size)[0]
    finally:
        os.close(fd)


def read_file(path: Path, may_hold: Callable[[int], bool] = lambda n_bytes: True) -> tuple[Header, bytes]:
    """Return a verified file: its header and its payload. Raises: OSError, BadFile, NewerFile, MemoryError.

    `may_hold`: asked before so many bytes are read, for they are not known to be right before.
    """
    fd = os.open(path, _READ_FLAGS)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise BadFile("no regular file")
        header, payload_sum = _header(os.read(fd, _HEAD.size + _CHECKSUM.size), fd, facts.st_size)
        if not may_hold(header.payload_bytes):
            raise MemoryError
        payload = _read(fd, header.payload_bytes)
        if len(payload) != header.payload_bytes or xxhash.xxh3_64_intdigest(payload) != payload_sum:
            raise BadFile("its bytes are not what was written")
        return header, payload
    finally:
        os.close(fd)


def _read(fd: int, n_bytes: int) -> bytes:
    """Return the next bytes of a file, fewer only at its end; one read, and no copy, where the system plays along."""
    data = os.read(fd, n_bytes)
    while len(data) < n_bytes and (more := os.read(fd, n_bytes - len(data))):
        data += more
    return data


def _header(head: bytes, fd: int, size_bytes: int) -> tuple[Header, int]:
    if len(head) < _HEAD.size + _CHECKSUM.size:
        raise BadFile("shorter than its header")
    magic, version, flags, key, parent, start, n_tokens, prefix, n_marks, n_payload = _HEAD.unpack_from(head)
    if magic == _MAGIC and version > VERSION:
        raise NewerFile(f"of version {version}")
    if magic != _MAGIC or version != VERSION:
        raise BadFile("not of this version")
    if n_marks > _MAX_MARKS_BYTES or n_marks not in (0, n_tokens * MARK_BYTES) or not n_tokens:
        raise BadFile("impossible lengths")
    if key == parent:
        raise BadFile("a block that follows itself")
    marks = os.read(fd, n_marks) if n_marks else b""
    head_sum, payload_sum = _CHECKSUM.unpack_from(head, _HEAD.size)
    if len(marks) != n_marks or xxhash.xxh3_64_intdigest(head[: _HEAD.size] + marks) != head_sum:
        raise BadFile("its header is not what was written")
    header = Header(Block(key, parent, start, n_tokens, marks, bool(flags & _BARE)), prefix, n_payload)
    if size_bytes != header.file_bytes:
        raise BadFile("cut off, or longer than it says")
    return header, payload_sum
