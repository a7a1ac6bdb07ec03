"""Headers that contradict themselves or their tensors are refused: each would end the native process."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.errors import ModelRefused
from localllm.models.gguf import read_header
from localllm.models.info import read_info
from tests.models.ggufs import STRING, U32, key, small_model

HUGE = 2**32 - 1

# (tiny model, field, values that kill or hang llama.cpp, field that the message names)
DEADLY = [
    ("llama-dense", "expert_count", (1, 7, 1000, 65_537, HUGE), "expert"),
    ("llama-dense", "expert_used_count", (1, 7, HUGE), "expert_used_count"),
    ("llama-dense", "expert_group_count", (1, 7, HUGE), "expert_group_count"),
    ("llama-dense", "nextn_predict_layers", (2, 3, HUGE), "nextn_predict_layers"),
    ("qwen3moe-moe", "expert_count", (0, 1, 65_537, HUGE), "expert"),
    ("qwen3moe-moe", "expert_used_count", (0, 3, HUGE), "expert_used_count"),
    ("qwen3moe-moe", "expert_group_count", (3, 1000), "expert_group_count"),
    ("qwen3moe-moe", "rope.dimension_count", (0, 1, 64, 255), "rope.dimension_count"),
    ("qwen2-dense", "rope.dimension_count", (0, 32, 130), "rope.dimension_count"),
    ("qwen2-dense", "attention.head_count", (1, 3, 1000, HUGE), "attention.head_count"),
    ("gpt-oss-moe", "attention.value_length_swa", (0, 7), "attention.value_length"),
    ("qwen35-dense", "rope.dimension_count", (0, 3, 130, HUGE), "rope.dimension_count"),
    ("gemma3-dense", "rope.dimension_count_swa", (0, 3, 130), "rope.dimension_count_swa"),
    ("gemma3-dense", "attention.key_length", (0, 1, 7, 1000), "attention.key_length"),
    ("gemma3-dense", "attention.value_length", (0, 1, 7, 1000), "attention.value_length"),
    ("lfm2-dense", "attention.value_length_swa", (0, 1, 7, HUGE), "attention.value_length"),
    ("qwen35-dense", "ssm.inner_size", (0, 1, 7, 1000), "ssm.inner_size"),
    ("granitehybrid-dense", "embedding_length", (1, 255, HUGE), "embedding_length"),
    ("granitehybrid-dense", "ssm.inner_size", (0, 1, 1000, HUGE), "ssm.inner_size"),
    ("gpt-oss-moe", "attention.key_length_swa", (1, 7, 1000), "attention.key_length"),
    ("deepseek2-moe", "attention.head_count_kv", (3, 7, 1000), "attention.head_count_kv"),
    ("deepseek2-moe", "attention.key_length", (1, 7, 1000), "attention.key_length"),
    ("deepseek2-moe", "attention.key_length_mla", (1, 7, 33), "attention.key_length_mla"),
    ("deepseek2-moe", "expert_gating_func", (5, 255, HUGE), "expert_gating_func"),
    ("deepseek2-moe", "rope.dimension_count", (255, 1000), "attention.key_length"),
]


def with_number(path: Path, field: str, value: int) -> bytes:
    """Return the file with one u32 of its architecture changed."""
    name = f"{read_header(path).architecture}.{field}".encode()
    raw = bytearray(path.read_bytes())
    begin = raw.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)
    assert raw[begin : begin + 4] == (4).to_bytes(4, "little")
    raw[begin + 4 : begin + 8] = value.to_bytes(4, "little")
    return bytes(raw)


@pytest.mark.parametrize(("model", "field", "values", "named"), DEADLY)
def test_number_that_kills_native_code_is_refused(
    model: str, field: str, values: tuple[int, ...], named: str, tiny: Path, tmp_path: Path
) -> None:
    for value in values:
        path = tmp_path / "changed.gguf"
        path.write_bytes(with_number(tiny / f"{model}.gguf", field, value))
        with pytest.raises(ModelRefused) as caught:
            read_info(path)
        assert named in caught.value.message


@pytest.mark.parametrize(
    "entry", [key("llama.rope.scaling.type", STRING, "linea"), key("llama.rope.scaling.type", U32, 1)]
)
def test_unknown_rope_scaling_is_refused(entry: bytes, tmp_path: Path) -> None:
    path = small_model().with_keys(entry).write(tmp_path / "m.gguf")
    with pytest.raises(ModelRefused, match=r"llama\.rope\.scaling\.type"):
        read_info(path)


def test_good_models_agree_with_themselves(tiny: Path) -> None:
    for path in tiny.glob("*.gguf"):
        assert read_info(path).n_layers == 2


def test_partial_rotation_is_no_contradiction_where_models_have_it(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.gguf"
    path.write_bytes(with_number(tiny / "qwen35-dense.gguf", "rope.dimension_count", 64))
    assert read_info(path).n_layers == 2
