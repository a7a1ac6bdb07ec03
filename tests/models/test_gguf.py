"""The header reader: what is good is read as the reference reads it, what is bad is refused by name."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.errors import ModelNotFound, ModelRefused
from localllm.models.gguf import GgufArray, read_header
from localllm.models.gguf.reader import MAX_KEYS, MAX_TENSORS
from localllm.models.gguf.types import TENSOR_TYPES
from localllm.models.gguf.values import MAX_STRINGS
from tests.models.ggufs import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    Q4_0,
    Q4_K,
    STRING,
    TYPE_F32,
    U8,
    U16,
    U32,
    U64,
    Gguf,
    key,
    small_model,
    string,
    tensor,
    u32,
    u64,
)

EMPTY = Gguf()
MODEL = small_model()
HUGE = 2**63


def one_tensor(entry: bytes, data: bytes = bytes(4096)) -> Gguf:
    return Gguf(tensors=(entry,), data=data)


def vocabulary(**changes: bytes) -> Gguf:
    """Return a vocabulary with some of its entries replaced or added."""
    entries = {
        "tokens": key("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "c"])),
        "scores": key("tokenizer.ggml.scores", ARRAY, (F32, [0.0, 0.0, 0.0])),
        "token_type": key("tokenizer.ggml.token_type", ARRAY, (I32, [1, 1, 1])),
        **changes,
    }
    return Gguf(keys=tuple(entry for entry in entries.values() if entry))


# name: (file, the field that the message must name)
BAD: dict[str, tuple[Gguf, str]] = {
    # header
    "magic of another order": (EMPTY.but(magic=b"FUGG"), "magic"),
    "magic of nothing": (EMPTY.but(magic=b"\0\0\0\0"), "magic"),
    "version 0": (EMPTY.but(version=u32(0)), "version"),
    "version 1": (EMPTY.but(version=u32(1)), "version"),
    "version of the future": (EMPTY.but(version=u32(4)), "version"),
    "big endian": (EMPTY.but(version=struct.pack(">I", 3)), "big-endian"),
    "tensor count beyond the file": (EMPTY.but(n_tensors=2**64 - 1), "tensor count"),
    "key count beyond the file": (EMPTY.but(n_keys=2**64 - 1), "key count"),
    "one key too few": (EMPTY.but(n_keys=1), "key"),
    "more tensors than are read": (one_tensor(b"", bytes(40 * MAX_TENSORS)).but(n_tensors=MAX_TENSORS + 1), "tensor"),
    "more keys than are read": (EMPTY.but(n_keys=MAX_KEYS + 1, data=bytes(20 * MAX_KEYS)), "key count"),
    # keys
    "key length beyond the file": (Gguf(keys=(u64(2**64 - 1) + b"k" + u32(U8) + b"\1",)), "key 0"),
    "key length 2^63": (Gguf(keys=(u64(HUGE) + b"k" + u32(U8) + b"\1",)), "key 0"),
    "empty key": (Gguf(keys=(key("", U8, 1),)), "key 0"),
    "key longer than allowed": (Gguf(keys=(key("k" * 70_000, U8, 1),)), "key 0"),
    "key of broken UTF-8": (Gguf(keys=(key(b"\xff\xfe", U8, 1),)), "key 0"),
    "key with a NUL": (Gguf(keys=(key("general.architecture\0x", U8, 1),)), "key 0"),
    "unknown value type": (Gguf(keys=(string("k") + u32(13) + b"\0" * 8,)), "k has the unknown value type 13"),
    "value type beyond all": (Gguf(keys=(string("k") + u32(2**32 - 1) + b"\0" * 8,)), "k has the unknown"),
    "duplicate key": (Gguf(keys=(key("k", U8, 1), key("k", U8, 2))), "k appears twice"),
    "bool of 2": (Gguf(keys=(string("k") + u32(BOOL) + b"\2",)), "k is a bool"),
    "string length 2^63": (Gguf(keys=(string("k") + u32(STRING) + u64(HUGE),)), "k says"),
    "string one byte too long": (Gguf(keys=(string("k") + u32(STRING) + u64(100) + b"x" * 60,)), "k says"),
    "nested array": (Gguf(keys=(string("k") + u32(ARRAY) + u32(ARRAY) + u64(1) + b"\0" * 20,)), "array of arrays"),
    "array of an unknown type": (
        Gguf(keys=(string("k") + u32(ARRAY) + u32(99) + u64(1) + b"\0" * 9,)),
        "value type 99",
    ),
    "array length 2^63": (Gguf(keys=(string("k") + u32(ARRAY) + u32(U8) + u64(HUGE),)), "k says"),
    "array length times size overflows": (Gguf(keys=(string("k") + u32(ARRAY) + u32(U64) + u64(2**61),)), "k says"),
    "string array length 2^63": (Gguf(keys=(string("k") + u32(ARRAY) + u32(STRING) + u64(HUGE),)), "k says"),
    "element length 2^63": (
        Gguf(keys=(string("k") + u32(ARRAY) + u32(STRING) + u64(2) + u64(HUGE) + b"\0" * 16,)),
        "k",
    ),
    "element length 2^64-1": (
        Gguf(keys=(string("k") + u32(ARRAY) + u32(STRING) + u64(2) + u64(2**64 - 1) + b"\0" * 16,)),
        "k (element 0)",
    ),
    "alignment 13": (Gguf(keys=(key("general.alignment", U32, 13),)), "general.alignment"),
    "alignment 0": (Gguf(keys=(key("general.alignment", U32, 0),)), "general.alignment"),
    "alignment 3": (MODEL.with_keys(key("general.alignment", U32, 3)), "general.alignment"),
    "alignment of another type": (Gguf(keys=(key("general.alignment", I32, 32),)), "general.alignment"),
    # tensors
    "tensor name too long": (one_tensor(tensor("n" * 64, (32,), TYPE_F32, 0)), "the name of tensor 0"),
    "tensor name empty": (one_tensor(tensor("", (32,), TYPE_F32, 0)), "the name of tensor 0"),
    "tensor name length 2^63": (one_tensor(u64(HUGE) + b"n" * 40), "the name of tensor 0"),
    "five dimensions": (one_tensor(tensor("t", (2, 2, 2, 2, 2), TYPE_F32, 0)), "tensor t has 5 dimensions"),
    "dimensions 2^32-1": (one_tensor(string("t") + u32(2**32 - 1) + bytes(64)), "tensor t"),
    "dimension of 0": (one_tensor(tensor("t", (0, 4), TYPE_F32, 0)), "tensor t has a dimension of size 0"),
    "dimension of -1": (one_tensor(tensor("t", (2**64 - 1,), TYPE_F32, 0)), "tensor t has a dimension of size -1"),
    "product overflows": (one_tensor(tensor("t", (2**40, 2**40), TYPE_F32, 0)), "tensor t has a shape"),
    "bytes overflow": (one_tensor(tensor("t", (2**60, 4), 27, 0)), "tensor t ends"),
    "rows do not divide": (one_tensor(tensor("t", (33, 2), Q4_0, 0)), "tensor t has rows of 33"),
    "unknown tensor type": (one_tensor(tensor("t", (32,), 43, 0)), "tensor t has the unknown type 43"),
    "removed tensor type": (one_tensor(tensor("t", (32,), 31, 0)), "tensor t has the removed type Q4_0_4_4"),
    "offset misaligned": (one_tensor(tensor("t", (32,), TYPE_F32, 4)), "tensor t has the offset 4"),
    "offset 2^64-1": (one_tensor(tensor("t", (32,), TYPE_F32, 2**64 - 1)), "tensor t"),
    "offset beyond the file": (one_tensor(tensor("t", (32,), TYPE_F32, 2**40)), "tensor t ends"),
    "gap before the first": (one_tensor(tensor("t", (32,), TYPE_F32, 64)), "tensor t leaves a gap"),
    "two tensors overlap": (
        Gguf(tensors=(tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 64)), data=bytes(512)),
        "tensor b overlaps",
    ),
    "duplicate tensor": (
        Gguf(tensors=(tensor("a", (32,), 0, 0), tensor("a", (32,), 0, 128)), data=bytes(512)),
        "tensor a appears twice",
    ),
    "aligned otherwise than declared": (
        Gguf(tensors=(tensor("a", (1,), 0, 0), tensor("b", (1,), 0, 4)), data=bytes(512)),
        "tensor b has the offset 4",
    ),
    "not enough data": (MODEL.but(data=MODEL.data[:-1]), "tensor blk.1.attn_k.weight ends"),
    "no data": (MODEL.but(data=b""), "tensor token_embd.weight ends"),
    "two tensors whose sizes add up past 2^64": (
        Gguf(tensors=(tensor("a", (2**63 - 64,), 24, 0), tensor("b", (2**63 - 64,), 24, 2**63 - 64)), data=bytes(64)),
        "tensor a ends",
    ),
    # fields that native code believes
    "scores of u8": (vocabulary(scores=key("tokenizer.ggml.scores", ARRAY, (U8, [0, 0, 0]))), "tokenizer.ggml.scores"),
    "scores of f64": (
        vocabulary(scores=key("tokenizer.ggml.scores", ARRAY, (F64, [0.0] * 3))),
        "tokenizer.ggml.scores",
    ),
    "scores too few": (vocabulary(scores=key("tokenizer.ggml.scores", ARRAY, (F32, [0.0]))), "tokenizer.ggml.scores"),
    "scores no array": (vocabulary(scores=key("tokenizer.ggml.scores", F32, 1.0)), "tokenizer.ggml.scores"),
    "types of u8": (vocabulary(token_type=key("tokenizer.ggml.token_type", ARRAY, (U8, [1] * 3))), "token_type"),
    "types too many": (vocabulary(token_type=key("tokenizer.ggml.token_type", ARRAY, (I32, [1] * 4))), "token_type"),
    "types without tokens": (vocabulary(tokens=b""), "tokenizer.ggml.tokens"),
    "tokens of i32": (vocabulary(tokens=key("tokenizer.ggml.tokens", ARRAY, (I32, [1] * 3))), "tokenizer.ggml.tokens"),
    "merges of u32": (vocabulary(merges=key("tokenizer.ggml.merges", ARRAY, (U32, [1]))), "tokenizer.ggml.merges"),
    "template no string": (EMPTY.with_keys(key("tokenizer.chat_template", U32, 1)), "tokenizer.chat_template"),
    "template of broken UTF-8": (EMPTY.with_keys(key("tokenizer.chat_template", STRING, b"\xff")), "chat_template"),
    "token id as string": (EMPTY.with_keys(key("tokenizer.ggml.bos_token_id", STRING, "1")), "bos_token_id"),
    "add_bos as integer": (EMPTY.with_keys(key("tokenizer.ggml.add_bos_token", U8, 1)), "add_bos_token"),
    "architecture no string": (EMPTY.with_keys(key("general.architecture", U32, 1)), "general.architecture"),
    "architecture empty": (EMPTY.with_keys(key("general.architecture", STRING, "")), "general.architecture"),
    "block_count 0": (small_model(block_count=key("llama.block_count", U32, 0)), "llama.block_count"),
    "block_count 600": (small_model(block_count=key("llama.block_count", U32, 600)), "llama.block_count"),
    "block_count 4e9": (small_model(block_count=key("llama.block_count", U32, 4_000_000_000)), "llama.block_count"),
    "block_count of i32": (small_model(block_count=key("llama.block_count", I32, -1)), "llama.block_count"),
    "block_count an array": (small_model(block_count=key("llama.block_count", ARRAY, (U32, [2]))), "llama.block_count"),
    "context_length a string": (small_model(context_length=key("llama.context_length", STRING, "1")), "context_length"),
    "heads of u8": (
        small_model(attention__head_count=key("llama.attention.head_count", ARRAY, (U8, [2, 2]))),
        "llama.attention.head_count",
    ),
    "heads of too few layers": (
        small_model(attention__head_count_kv=key("llama.attention.head_count_kv", ARRAY, (U32, [2]))),
        "llama.attention.head_count_kv",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_by_field_name(name: str, tmp_path: Path) -> None:
    file, field = BAD[name]
    path = file.write(tmp_path / "bad.gguf")
    with pytest.raises(ModelRefused) as caught:
        read_header(path)
    assert field in caught.value.message
    assert caught.value.message.startswith("bad.gguf: ")
    assert caught.value.hint


def test_refusing_allocates_no_more_than_the_file_holds(tmp_path: Path) -> None:
    paths = [file.write(tmp_path / f"{index}.gguf") for index, (file, _) in enumerate(BAD.values())]
    for path in paths:
        tracemalloc.start()
        with pytest.raises(ModelRefused):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * path.stat().st_size + 200_000


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        (b"", "empty"),
        (b"GG", "not GGUF"),
        (b"PK\x03\x04" + bytes(60), "zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (struct.pack("<Q", 100) + b'{"__metadata__":{}}', "safetensors"),
        (b"tjgg" + bytes(60), "GGML"),
    ],
)
def test_another_kind_of_file_is_named(begin: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(begin)
    with pytest.raises(ModelRefused, match=words):
        read_header(path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_header(tmp_path / "nothing.gguf")
    with pytest.raises(ModelRefused, match="directory"):
        read_header(tmp_path)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelRefused, match="regular"):
        read_header(pipe)
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    with pytest.raises(ModelRefused, match="loop"):
        read_header(loop)
    with pytest.raises(ModelRefused, match="cannot be opened"):
        read_header(tmp_path / ("x" * 300))
    with pytest.raises(ModelRefused, match="cannot be opened"):
        read_header(tmp_path / "nul\0byte")


@pytest.mark.parametrize("version", [2, 3])
def test_empty_header_is_read(version: int, tmp_path: Path) -> None:
    header = read_header(EMPTY.but(version=u32(version)).write(tmp_path / "m.gguf"))
    assert (header.version, len(header.metadata), header.tensors) == (version, 0, ())


def test_values_of_every_type_come_back(tmp_path: Path) -> None:
    values: dict[int, object] = {
        U8: 200, I8: -5, U16: 60_000, I16: -300, U32: 2**32 - 1, I32: -7, F32: 0.5, BOOL: True,
        STRING: "größe 🦊", U64: 2**64 - 1, I64: -(2**63), F64: 1e300,
    }  # fmt: skip
    keys = [key(f"k{value_type}", value_type, value) for value_type, value in values.items()]
    keys += [key(f"a{value_type}", ARRAY, (value_type, [value] * 3)) for value_type, value in values.items()]
    header = read_header(Gguf(keys=(*keys, key("none", ARRAY, (STRING, [])))).write(tmp_path / "m.gguf"))
    for value_type, value in values.items():
        assert header.metadata[f"k{value_type}"] == value
        got = header.metadata[f"a{value_type}"]
        assert isinstance(got, GgufArray)
        assert (list(got), len(got), got[1], got[1:]) == ([value] * 3, 3, value, [value] * 2)
    assert list(header.metadata["none"]) == []


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    file = Gguf(
        keys=(key("general.alignment", U32, 1),),
        tensors=(tensor("a", (1,), 0, 0), tensor("b", (3,), 0, 4), tensor("c", (256, 2), Q4_K, 16)),
        data=bytes(16 + 288),
        alignment=1,
    )
    header = read_header(file.write(tmp_path / "m.gguf"))
    assert header.alignment == 1
    assert [(t.offset, t.n_bytes, t.n_values) for t in header.tensors] == [(0, 4, 1), (4, 12, 3), (16, 288, 512)]
    assert header.data_offset + 16 + 288 == header.file_bytes


def test_header_larger_than_the_first_read_is_read_on(tmp_path: Path) -> None:
    words = [f"word {index} " + "x" * 60 for index in range(60_000)]
    file = Gguf(keys=(key("words", ARRAY, (STRING, words)), key("last", U32, 7)))
    header = read_header(file.write(tmp_path / "m.gguf"))
    assert header.file_bytes > 2 * 2**21
    assert header.metadata["last"] == 7
    assert list(header.metadata["words"]) == words


def test_worst_header_within_the_limits_takes_under_a_second(tmp_path: Path) -> None:
    many = string("k") + u32(ARRAY) + u32(STRING) + u64(MAX_STRINGS) + bytes(8 * MAX_STRINGS)
    path = Gguf(keys=(many, key("last", U8, 1))).write(tmp_path / "m.gguf")
    begin = time.process_time()
    assert read_header(path).metadata["last"] == 1
    assert time.process_time() - begin < 1
    more = string("k") + u32(ARRAY) + u32(STRING) + u64(MAX_STRINGS + 1) + bytes(8 * MAX_STRINGS + 8)
    with pytest.raises(ModelRefused, match="strings"):
        read_header(Gguf(keys=(more,)).write(path))


def test_metadata_beyond_64_mb_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    head = Gguf(keys=(string("k") + u32(ARRAY) + u32(U8) + u64(2**30),)).to_bytes()
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(ModelRefused, match="64 MB"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


def _outcome(path: Path) -> bool:
    """Return whether the file is read; raises whatever is no refusal."""
    try:
        header = read_header(path)
    except ModelRefused as refused:
        return not 0 < len(refused.message) < 600
    for value in header.metadata.values():
        if isinstance(value, GgufArray):
            value.to_list()
    return True


def _mutations(base: bytes, n: int, within: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    numbers = (0, 1, 7, 0x7F, 0xFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    for _ in range(n):
        raw = bytearray(base)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(within)
            kind = rng.randrange(4)
            if kind == 0:
                raw[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                raw[at] = rng.randrange(256)
            elif kind == 2:
                raw[at : at + 8] = u64(rng.choice(numbers))
            else:
                del raw[at : at + rng.choice((1, 4, 8))]
        yield bytes(raw)


def test_mutated_headers_are_read_or_refused(tmp_path: Path) -> None:
    base = MODEL.to_bytes()
    path, outcomes, slowest = tmp_path / "m.gguf", [], 0.0
    for raw in _mutations(base, 2_000, len(base) - len(MODEL.data), seed=3):
        path.write_bytes(raw)
        begin = time.process_time()
        outcomes.append(_outcome(path))
        slowest = max(slowest, time.process_time() - begin)
    assert 100 < sum(outcomes) < 1_900
    assert slowest < 1


@pytest.mark.parametrize("name", ["vocab/ggml-vocab-llama-spm.gguf", "tiny/qwen35-dense.gguf"])
def test_mutated_real_headers_are_read_or_refused(name: str, shared: Path, tmp_path: Path) -> None:
    base = (shared / "models" / name).read_bytes()
    path = tmp_path / "m.gguf"
    outcomes = []
    for raw in _mutations(base, 60, 4_000, seed=4):
        path.write_bytes(raw)
        outcomes.append(_outcome(path))
    assert len(outcomes) == 60
    assert not all(outcomes)


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    base = MODEL.to_bytes()
    path = tmp_path / "m.gguf"
    for index in range(200):
        path.write_bytes(base[: index * (len(base) - 1) // 199])
        assert not _outcome(path)
    path.write_bytes(base)
    assert _outcome(path)


@pytest.mark.parametrize("folder", ["tiny", "vocab"])
def test_reads_what_the_reference_package_reads(folder: str, shared: Path) -> None:
    from gguf import GGUFReader

    paths = sorted((shared / "models" / folder).glob("*.gguf"))
    assert paths
    for path in paths:
        header, reference = read_header(path), GGUFReader(path)
        fields = {name: part for name, part in reference.fields.items() if not name.startswith("GGUF.")}
        assert set(header.metadata) == set(fields)
        for name, part in fields.items():
            value = header.metadata[name]
            assert (list(value) if isinstance(value, GgufArray) else value) == part.contents(), name
        ours = [(t.name, t.shape, t.n_bytes, header.data_offset + t.offset, t.type.name) for t in header.tensors]
        theirs = [
            (t.name, tuple(map(int, t.shape)), int(t.n_bytes), int(t.data_offset), t.tensor_type.name)
            for t in reference.tensors
        ]
        assert ours == theirs


def test_tensor_types_have_the_sizes_of_the_reference_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, ours in TENSOR_TYPES.items():
        if number in {member.value for member in GGMLQuantizationType}:
            theirs = GGMLQuantizationType(number)
            assert ours.name == theirs.name
            # Q8_1 is no storage type; the package keeps the size it had before its scale shrank.
            if ours.name != "Q8_1":
                assert (ours.block_values, ours.block_bytes) == GGML_QUANT_SIZES[theirs]


@pytest.mark.real
def test_real_header_costs_little_while_its_vocabulary_is_not_asked_for(smollm2: Path) -> None:
    begin = time.process_time()
    header = read_header(smollm2)
    assert time.process_time() - begin < 0.3
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == 49_152
    assert tokens[1] == "<|im_start|>"


def test_token_spelled_twice_is_refused_but_empty_spellings_are_not(tmp_path: Path) -> None:
    def tokens(*spellings: str) -> Path:
        keys = (key("tokenizer.ggml.tokens", ARRAY, (STRING, list(spellings))),)
        return Gguf(keys=keys).write(tmp_path / "m.gguf")

    with pytest.raises(ModelRefused, match=r"tokenizer\.ggml\.tokens holds the token b'b' twice"):
        read_header(tokens("a", "b", "", "b"))
    assert len(read_header(tokens("a", "", "b", "")).metadata) == 1
