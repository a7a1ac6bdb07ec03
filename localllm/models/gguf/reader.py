"""Reads the header of a GGUF file under bounds, before native code sees the file.

Everything the file says is checked against what the file has: no count, length or offset is
believed, nothing larger than the rest of the file is allocated, and every refusal names its field.
The file is read, never mapped: another process that cuts it short cannot kill this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from localllm.models.gguf.known_fields import check_fields
from localllm.models.gguf.source import Source, open_regular, refusal, shown
from localllm.models.gguf.types import REMOVED_TENSOR_TYPES, TENSOR_TYPES, TensorType
from localllm.models.gguf.values import Cursor, Value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMS = 4
_MAX_VALUES = 2**63 - 1
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8

# What a file that is no GGUF begins with, and what it then is.
_OTHER_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"lmgg", "an old GGML file (before GGUF); convert it again from the original weights"),
    (b"fmgg", "an old GGML file (before GGUF); convert it again from the original weights"),
    (b"tjgg", "an old GGML file (before GGUF); convert it again from the original weights"),
    (b"FUGG", "a big-endian GGUF file"),
    (b"PK\x03\x04", "a zip archive (a wheel, or PyTorch weights)"),
    (b"version https://git-lfs", "a Git LFS pointer: the weights themselves were not downloaded"),
    (b"<", "an HTML or XML page, not the model it should be"),
    (b"{", "a JSON document"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` in bytes from the start of the data section; shape as ggml
    orders it (the row length first)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    n_bytes: int

    @property
    def n_values(self) -> int:
        """Product of the shape."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself, all of it within bounds.

    Metadata arrays are lazy (`GgufArray`) and hold on to the header's bytes: keep what you need of
    a header, not the header. `data_offset` is where the tensors' data begins.
    """

    path: Path
    file_bytes: int
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" where the file has none (later parts of a split set)."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`; the tensors' data is not read.

    Raises: ModelNotFound if no file is there; ModelRefused naming the field that is wrong.
    Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3.
    """
    with open_regular(path) as file:
        source = Source(file, path.name)
        cursor = Cursor(source)
        version = _read_magic(cursor)
        n_tensors = cursor.count("the tensor count", _MIN_TENSOR_BYTES, MAX_TENSORS, "tensors")
        n_keys = cursor.count("the key count", _MIN_KEY_BYTES, MAX_KEYS, "keys")
        metadata, types = _read_metadata(cursor, n_keys)
        alignment = check_fields(source.name, metadata, types)
        tensors = _read_tensors(cursor, n_tensors)
    data_offset = _padded(cursor.position, alignment)
    _check_layout(source, tensors, data_offset, alignment)
    return GgufHeader(path, source.file_bytes, version, alignment, MappingProxyType(metadata), tensors, data_offset)


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _read_magic(cursor: Cursor) -> int:
    start = bytes(cursor.source.buffer[:32])
    if not start:
        cursor.refuse("the magic", "is missing: the file is empty")
    if start[:4] != MAGIC:
        kind = next((kind for begin, kind in _OTHER_FORMATS if start.startswith(begin)), "")
        if start[8:10] == b'{"':
            kind = "a safetensors file"
        cursor.refuse("the magic", f"is not GGUF: this is {kind}" if kind else "is not GGUF: this is no GGUF file")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version & 0xFFFF == 0 and 0 < swapped < 0x10000:
            cursor.refuse("the version", f"is {swapped} in big-endian order: big-endian files are not read")
        cursor.refuse("the version", f"is {version}; versions 2 and 3 are read")
    return version


def _read_metadata(cursor: Cursor, n_keys: int) -> tuple[dict[str, Value], dict[str, int]]:
    """Return values and declared types by key."""
    metadata: dict[str, Value] = {}
    types: dict[str, int] = {}
    for index in range(n_keys):
        key = _read_name(cursor, f"key {index}", MAX_KEY_BYTES)
        field = shown(key)
        if key in metadata:
            cursor.refuse(field, "appears twice")
        types[key] = cursor.u32(field)
        metadata[key] = cursor.value(types[key], field)
    return metadata, types


def _read_name(cursor: Cursor, field: str, limit: int) -> str:
    raw = cursor.raw_string(field, limit)
    if not raw:
        cursor.refuse(field, "is empty")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        cursor.refuse(field, f"is not valid UTF-8 ({shown(raw.decode('latin-1'))})")
    if any(character < " " for character in name):
        cursor.refuse(field, f"holds control characters ({shown(name)})")
    return name


def _read_tensors(cursor: Cursor, n_tensors: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        name = _read_name(cursor, f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in tensors:
            cursor.refuse(f"tensor {shown(name)}", "appears twice")
        tensors[name] = _read_tensor(cursor, name, f"tensor {shown(name)}")
    return tuple(tensors.values())


def _read_tensor(cursor: Cursor, name: str, field: str) -> TensorInfo:
    n_dims = cursor.u32(field)
    if n_dims > MAX_DIMS:
        cursor.refuse(field, f"has {n_dims} dimensions; at most {MAX_DIMS} are allowed")
    shape = tuple(cursor.u64(field) for _ in range(n_dims))
    n_values = 1
    for size in shape:
        if not 0 < size <= _MAX_VALUES:
            cursor.refuse(field, f"has a dimension of size {size if size == 0 else size - 2**64}")
        n_values *= size
    if n_values > _MAX_VALUES:
        cursor.refuse(field, f"has a shape {shape} whose product overflows")
    tensor_type = _tensor_type(cursor, cursor.u32(field), field)
    row = shape[0] if shape else 1
    if row % tensor_type.block_values:
        cursor.refuse(field, f"has rows of {row} values; {tensor_type.name} packs {tensor_type.block_values} at a time")
    n_bytes = n_values // tensor_type.block_values * tensor_type.block_bytes
    return TensorInfo(name, shape, tensor_type, cursor.u64(field), n_bytes)


def _tensor_type(cursor: Cursor, number: int, field: str) -> TensorType:
    tensor_type = TENSOR_TYPES.get(number)
    if tensor_type is None:
        removed = REMOVED_TENSOR_TYPES.get(number)
        cursor.refuse(field, f"has the removed type {removed}" if removed else f"has the unknown type {number}")
    return tensor_type


def _check_layout(source: Source, tensors: tuple[TensorInfo, ...], data_offset: int, alignment: int) -> None:
    """Refuse tensors that are misaligned, leave the file, overlap, or leave gaps between them.

    llama.cpp reads only files whose tensors follow each other in header order, each padded.
    """
    expected = 0
    for tensor in tensors:
        field = f"tensor {shown(tensor.name)}"
        if tensor.offset % alignment:
            raise refusal(source.name, field, f"has the offset {tensor.offset:,}, not a multiple of {alignment}")
        if data_offset + tensor.offset + tensor.n_bytes > source.file_bytes:
            raise refusal(
                source.name,
                field,
                f"ends at byte {data_offset + tensor.offset + tensor.n_bytes:,}, "
                f"but the file has only {source.file_bytes:,}: cut short or corrupt",
            )
        if tensor.offset != expected:
            kind = "overlaps the tensor before it" if tensor.offset < expected else "leaves a gap before it"
            raise refusal(source.name, field, f"{kind}: offset {tensor.offset:,}, expected {expected:,}")
        expected = _padded(expected + tensor.n_bytes, alignment)
