"""What --deterministic decides, and what it refuses with the reason: pure, on machines that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.placement import place
from localllm.backends.registry import context_settings
from localllm.errors import NotEnoughMemory, UsageError
from localllm.models.info import ModelInfo, read_info
from localllm.models.kv_types import KvTypes
from localllm.models.memory import largest_ctx
from localllm.runtime.config import AUTO_CTX_TOKENS, LoadConfig
from localllm.runtime.modes import EXACT_PARALLEL, EXACT_RETAINED, served
from tests.backends.test_placement import GB, LAPTOP, with_gpu


@pytest.fixture(scope="module")
def dense(tiny: Path) -> ModelInfo:
    """A tiny model that claims to be trained for 32 768 tokens."""
    return replace(read_info(tiny / "llama-dense.gguf"), n_ctx_train=32768)


def exact(**wishes: Any) -> LoadConfig:
    return LoadConfig(deterministic=True, **wishes)


def test_it_decides_all_that_bits_depend_on(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP, exact())
    assert (str(plan.kv), plan.flash_attn, plan.repack, plan.n_gpu_layers) == ("q8_0", "on", False, 0)
    assert (plan.kv_unified, plan.swa_full, plan.cut_tokens, plan.n_batch, plan.n_ubatch) == (False, True, 64, 64, 64)
    assert plan.n_ctx == 3 * AUTO_CTX_TOKENS  # each slot has a whole context of its own
    assert plan.max_sequence_tokens == AUTO_CTX_TOKENS
    assert any("deterministic" in note for note in plan.notes)
    settings = context_settings(plan)
    assert (settings.cut_tokens, settings.kv_unified, settings.swa_full) == (64, False, True)


def test_nothing_of_it_is_there_without(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP)
    assert (plan.cut_tokens, plan.kv_unified, plan.swa_full, plan.exact_rows) == (0, True, False, 1)


@pytest.mark.parametrize(("parallel", "n_rows"), [(1, 1), (2, 2), (4, 4), (20, 7)])
def test_no_more_rows_are_run_together_than_are_equal_alone(dense: ModelInfo, parallel: int, n_rows: int) -> None:
    assert place(dense, LAPTOP, exact(parallel=parallel)).exact_rows == n_rows


def test_many_slots_have_a_row_each_in_a_batch(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP, exact(parallel=100, ctx=256))
    assert (plan.n_slots, plan.n_batch, plan.n_ctx) == (102, 102, 102 * 256)


@pytest.mark.parametrize(
    ("wishes", "field", "way_out"),
    [
        ({"kv": KvTypes("q4_0", "q4_0")}, "kv", "--kv q8_0"),
        ({"kv": KvTypes("q8_0", "f16")}, "kv", "--kv q8_0"),
        ({"flash_attn": "off"}, "flash_attn", "--flash-attn on"),
        ({"gpu": "all"}, "gpu", "--gpu off"),
        ({"gpu": 4}, "gpu", "--gpu off"),
    ],
)
def test_wishes_that_rule_it_out_are_refused(
    dense: ModelInfo, wishes: dict[str, Any], field: str, way_out: str
) -> None:
    with pytest.raises(UsageError, match="--deterministic") as refused:
        place(dense, LAPTOP, exact(**wishes))
    assert refused.value.hint.startswith(way_out)
    assert refused.value.details["field"] == field


@pytest.mark.parametrize("wishes", [{"kv": KvTypes("q8_0", "q8_0")}, {"flash_attn": "on"}, {"gpu": "off"}, {"gpu": 0}])
def test_wishes_that_agree_with_it_are_taken(dense: ModelInfo, wishes: dict[str, Any]) -> None:
    assert place(dense, LAPTOP, exact(**wishes)).cut_tokens == 64


def test_a_gpu_is_never_left_out_quietly(dense: ModelInfo) -> None:
    with pytest.raises(UsageError, match="on the CPU only") as refused:
        place(dense, with_gpu(8 * GB), exact())
    assert refused.value.hint.startswith("--gpu off")
    assert place(dense, with_gpu(8 * GB), exact(gpu="off")).n_gpu_layers == 0


def test_head_sizes_that_q8_0_cannot_pack_are_refused(dense: ModelInfo) -> None:
    odd = replace(dense, layers=tuple(replace(layer, head_size_k=48) for layer in dense.layers))
    with pytest.raises(UsageError, match="head sizes"):
        place(odd, LAPTOP, exact())


def test_a_context_is_the_length_of_each_sequence(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP, exact(ctx=1000, parallel=2))
    assert (plan.n_ctx, plan.max_sequence_tokens) == (4 * 1024, 1000)
    assert place(dense, LAPTOP, exact(), 600).max_sequence_tokens == 768
    short = replace(dense, n_ctx_train=200)
    assert place(short, LAPTOP, exact(), 150).max_sequence_tokens == 200
    with pytest.raises(UsageError, match="length of each sequence") as refused:
        place(short, LAPTOP, exact(ctx=201, parallel=4))
    assert refused.value.hint == "--ctx 200"


def test_an_automatic_context_is_cut_to_what_fits_for_all(dense: ModelInfo) -> None:
    roomy = place(dense, LAPTOP, exact(parallel=4))
    tight = replace(LAPTOP, available_bytes=int(roomy.memory.total_bytes * 0.6))
    plan = place(dense, tight, exact(parallel=4))
    assert plan.memory.total_bytes <= 0.9 * tight.available_bytes
    assert 512 <= plan.max_sequence_tokens < roomy.max_sequence_tokens
    assert any(note.startswith(f"context cut to {plan.max_sequence_tokens} tokens") for note in plan.notes)
    assert largest_ctx(dense, int(0.9 * tight.available_bytes), plan.shape) == plan.max_sequence_tokens
    with pytest.raises(NotEnoughMemory) as refused:
        place(dense, tight, exact(parallel=4, ctx=8192))
    assert refused.value.hint.startswith(f"--ctx {plan.max_sequence_tokens} ")


def test_a_server_keeps_fewer_slots_as_each_has_a_context_of_its_own() -> None:
    config = served(exact())
    assert (config.parallel, config.retained) == (EXACT_PARALLEL, EXACT_RETAINED)
    assert served(exact(), 7).parallel == 7
    assert served(LoadConfig()).parallel > EXACT_PARALLEL
