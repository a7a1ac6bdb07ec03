"""Builds small GGUF files byte by byte, good ones and bad ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
Q4_0, Q4_K, TYPE_F32 = 2, 12, 0


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def array(element_type: int, values: Iterable[object]) -> bytes:
    items = list(values)
    body = b"".join(payload(element_type, item) for item in items)
    return u32(element_type) + u64(len(items)) + body


def payload(value_type: int, value: object) -> bytes:
    """Return a value's bytes; of an array, `value` is (element type, values) or its raw bytes."""
    if isinstance(value, bytes) and value_type == ARRAY:
        return value
    if value_type == ARRAY:
        element_type, items = value
        return array(element_type, items)
    if value_type == STRING:
        return string(value)
    return struct.pack("<" + _CODES[value_type], value)


def key(name: str | bytes, value_type: int, value: object) -> bytes:
    """Return one metadata entry."""
    return string(name) + u32(value_type) + payload(value_type, value)


def tensor(name: str, shape: Iterable[int], type_number: int, offset: int) -> bytes:
    """Return one tensor entry."""
    dims = list(shape)
    return string(name) + u32(len(dims)) + b"".join(u64(size) for size in dims) + u32(type_number) + u64(offset)


@dataclass(frozen=True)
class Gguf:
    """The pieces of a file; counts are those of the pieces unless they are given."""

    keys: tuple[bytes, ...] = ()
    tensors: tuple[bytes, ...] = ()
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: bytes = u32(3)
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    def but(self, **changes: object) -> Gguf:
        return replace(self, **changes)

    def with_keys(self, *keys: bytes) -> Gguf:
        return replace(self, keys=self.keys + keys)

    def to_bytes(self) -> bytes:
        head = self.magic + self.version
        head += u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        head += u64(len(self.keys) if self.n_keys is None else self.n_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + b"\0" * (-len(head) % self.alignment) + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def vocabulary_keys(n_tokens: int = 8) -> tuple[bytes, ...]:
    """Return the keys of a small, consistent vocabulary."""
    return (
        key("tokenizer.ggml.model", STRING, "gpt2"),
        key("tokenizer.ggml.tokens", ARRAY, (STRING, [f"tok_{i}" for i in range(n_tokens)])),
        key("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * n_tokens)),
        key("tokenizer.ggml.token_type", ARRAY, (I32, [1] * n_tokens)),
        key("tokenizer.ggml.merges", ARRAY, (STRING, ["a b", "c d"])),
    )


def model_keys(architecture: str = "llama", **changes: bytes | None) -> tuple[bytes, ...]:
    """Return the keys of a small model; `changes` replace an entry by field name (None = leave out).

    Names with dots are written with two underscores: attention__head_count.
    """
    fields: dict[str, bytes | None] = {
        name: key(f"{architecture}.{name}", U32, value)
        for name, value in {
            "block_count": 2,
            "context_length": 1024,
            "embedding_length": 64,
            "feed_forward_length": 128,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
        }.items()
    }
    fields.update({name.replace("__", "."): value for name, value in changes.items()})
    return (
        key("general.architecture", STRING, architecture),
        *(entry for entry in fields.values() if entry is not None),
    )


def small_model(architecture: str = "llama", **changes: bytes | None) -> Gguf:
    """Return a model of two layers with a vocabulary of 8 tokens and three small tensors."""
    return Gguf(
        keys=model_keys(architecture, **changes) + vocabulary_keys(),
        tensors=(
            tensor("token_embd.weight", (64, 8), TYPE_F32, 0),
            tensor("blk.0.attn_k.weight", (64, 32), Q4_0, 2048),
            tensor("blk.1.attn_k.weight", (64, 32), Q4_0, 2048 + 1152),
        ),
        data=bytes(2048 + 2 * 1152),
    )
