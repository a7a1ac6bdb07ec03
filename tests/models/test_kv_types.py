"""KV cache types: their spelling, their bytes, and the combinations that are refused."""

from __future__ import annotations

import pytest

from localllm.errors import UsageError
from localllm.models.kv_types import ALL_TYPES, FLAG_TYPES, KvTypes, number_of, packing_of, row_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f16", KvTypes()),
        ("q8_0", KvTypes("q8_0", "q8_0")),
        ("Q8_0:f16", KvTypes("q8_0", "f16")),
        (" q4_0:q8_0 ", KvTypes("q4_0", "q8_0")),
    ],
)
def test_spelling_is_read_and_written(text: str, expected: KvTypes) -> None:
    assert KvTypes.parse(text) == expected
    assert KvTypes.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "q9", "q8_0:", ":f16", "f16:f16:f16", "bf16", "q5_1", "int8"])
def test_other_spellings_are_refused_with_the_choices(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        KvTypes.parse(text)
    assert all(name in caught.value.hint for name in FLAG_TYPES)


def test_unknown_type_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(UsageError, match="q9"):
        KvTypes("q9")


def test_numbers_and_bytes_are_those_of_ggml() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for name in ALL_TYPES:
        number, packing = GGMLQuantizationType[name.upper()], packing_of(name)
        assert number_of(name) == number
        assert (packing.block_values, packing.block_bytes) == GGML_QUANT_SIZES[number]
    assert (row_bytes("q4_0", 128), row_bytes("f16", 128)) == (72, 256)
    assert [name for name in ALL_TYPES if not packing_of(name).is_quantized] == ["f32", "f16", "bf16"]


def test_quantised_v_without_flash_attention_names_both_ways_out() -> None:
    with pytest.raises(UsageError) as caught:
        KvTypes.parse("q8_0").check(head_sizes_k=[64], head_sizes_v=[64], flash_attn=False)
    assert "--flash-attn on" in caught.value.hint
    assert "--kv q8_0:f16" in caught.value.hint


def test_head_size_that_blocks_do_not_divide_is_refused_with_the_side() -> None:
    with pytest.raises(UsageError) as caught:
        KvTypes.parse("q4_0:f16").check(head_sizes_k=[64, 80], head_sizes_v=[80], flash_attn=True)
    assert "80" in caught.value.message
    assert " K " in caught.value.message
    assert "--kv f16" in caught.value.hint
    with pytest.raises(UsageError, match=" V "):
        KvTypes.parse("f16:q8_0").check(head_sizes_k=[80], head_sizes_v=[80], flash_attn=True)


@pytest.mark.parametrize("text", ["q8_0:f16", "f16"])
def test_what_the_engine_can_do_is_not_refused(text: str) -> None:
    kv = KvTypes.parse(text)
    kv.check(head_sizes_k=[64, 128], head_sizes_v=[80], flash_attn=False)
    assert not kv.needs_flash_attention


def test_model_without_a_v_cache_takes_one_type_only() -> None:
    sizes = {"head_sizes_k": [576], "head_sizes_v": [], "flash_attn": True, "reads_v_from_k": True}
    KvTypes.parse("q8_0").check(**sizes)
    with pytest.raises(UsageError) as caught:
        KvTypes.parse("q8_0:f16").check(**sizes)
    assert "--kv q8_0" in caught.value.hint
