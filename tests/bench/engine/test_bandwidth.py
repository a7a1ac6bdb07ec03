"""The bandwidth probe, and the bytes that one decoded row reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from localllm.bench.engine.bandwidth import last_cache_bytes, probe_bytes, read_bandwidth, weight_bytes_per_token
from localllm.models.gguf import TensorInfo
from localllm.models.gguf.types import TENSOR_TYPES
from localllm.models.info import ModelInfo, read_info


def info(n_expert: int = 0, n_expert_used: int = 0, **tensors: tuple[tuple[int, ...], int]) -> ModelInfo:
    infos = tuple(
        TensorInfo(name.replace("__", "."), shape, TENSOR_TYPES[1], 0, n_bytes)
        for name, (shape, n_bytes) in tensors.items()
    )
    return cast(ModelInfo, SimpleNamespace(tensors=infos, n_expert=n_expert, n_expert_used=n_expert_used))


def test_a_table_that_is_also_the_output_is_read_whole() -> None:
    assert weight_bytes_per_token(info(token_embd__weight=((8, 100), 1600), blk__0__ffn=((8, 8), 64))) == 1664


def test_a_table_of_its_own_gives_one_row() -> None:
    both = info(token_embd__weight=((8, 100), 1600), output__weight=((8, 100), 1600))
    assert weight_bytes_per_token(both) == 1600 + 16


def test_of_experts_only_the_chosen_are_read() -> None:
    found = info(8, 2, blk__0__ffn_up_exps__weight=((8, 8, 8), 800), blk__0__attn_q__weight=((8, 8), 100))
    assert weight_bytes_per_token(found) == 300


def test_a_real_header_reads_about_its_file(tiny: Path) -> None:
    path = tiny / "llama-dense.gguf"
    assert 0 < weight_bytes_per_token(read_info(path)) <= path.stat().st_size


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, text in enumerate(("48K", "2048K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{text}\n")
    assert last_cache_bytes(tmp_path) == 32 << 20
    assert last_cache_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("cache_bytes", "available_bytes", "expected"),
    [
        (0, 64 << 30, 256 << 20),
        (300 << 20, 64 << 30, 1200 << 20),
        (1 << 30, 64 << 30, 2 << 30),
        (300 << 20, 1 << 30, 256 << 20),
    ],
)
def test_the_probe_outgrows_the_cache_but_not_the_memory(cache_bytes: int, available_bytes: int, expected: int) -> None:
    assert probe_bytes(cache_bytes, available_bytes) == expected


def test_bandwidth_is_plausible() -> None:
    found = read_bandwidth(2, 8 << 20, n_reps=3)
    assert found.n == 3
    assert 1e8 < found.median < 1e13
