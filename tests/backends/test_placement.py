"""Placement is pure: fake machines and wishes, and the plan that is expected of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.backends.cpu.probe import CpuFacts
from localllm.backends.llamacpp.devices import Device
from localllm.backends.placement import Machine, place
from localllm.errors import NotEnoughMemory, UsageError
from localllm.models.info import ModelInfo, read_info
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import AUTO_CTX_TOKENS, LoadConfig
from localllm.runtime.modes import served

GB = 10**9
CPU = CpuFacts("x", "x86_64", frozenset(), 8, 8, 4)
LAPTOP = Machine(CPU, (Device("CPU", "x", "cpu", 0, 0),), 16 * GB)


def with_gpu(free_bytes: int) -> Machine:
    return replace(LAPTOP, devices=(*LAPTOP.devices, Device("CUDA0", "a GPU", "gpu", free_bytes, 24 * GB)))


@pytest.fixture(scope="module")
def dense(tiny: Path) -> ModelInfo:
    """A tiny model that claims to be trained for 32 768 tokens."""
    return replace(read_info(tiny / "llama-dense.gguf"), n_ctx_train=32768)


def test_a_cpu_machine_gets_cores_slots_and_an_automatic_context(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP)
    assert (plan.n_gpu_layers, plan.n_threads, plan.n_ctx) == (0, 4, AUTO_CTX_TOKENS)
    assert (plan.n_slots, plan.kv_unified, plan.repack) == (3, True, True)  # running, retained, spare
    assert (plan.n_batch, plan.n_ubatch, plan.flash_attn) == (512, 512, "auto")
    assert plan.notes == (f"{dense.n_layers}/{dense.n_layers} layers on CPU, KV f16 on CPU",)


@pytest.mark.parametrize(("need", "n_ctx"), [(1, 512), (400, 512), (600, 768), (769, 1024), (40000, 32768)])
def test_a_sized_context_is_just_long_enough(dense: ModelInfo, need: int, n_ctx: int) -> None:
    assert place(dense, LAPTOP, LoadConfig(), need).n_ctx == n_ctx


def test_a_short_trained_context_is_never_exceeded(dense: ModelInfo) -> None:
    short = replace(dense, n_ctx_train=200)
    assert place(short, LAPTOP, LoadConfig(), 150).n_ctx == 200
    plan = place(short, LAPTOP, LoadConfig(parallel=4))
    assert (plan.n_ctx, plan.max_sequence_tokens, plan.n_slots) == (400, 200, 6)
    with pytest.raises(UsageError, match="trained for") as refused:
        place(short, LAPTOP, LoadConfig(ctx=201))
    assert refused.value.hint == "--ctx 200"
    with pytest.raises(UsageError, match="beyond 4 times the 200 tokens") as refused:
        place(short, LAPTOP, LoadConfig(ctx=801, parallel=4))
    assert refused.value.hint == "--ctx 800"
    assert place(dense, LAPTOP, LoadConfig(ctx=1000)).n_ctx == 1000


@pytest.mark.parametrize(
    ("parallel", "trained", "pool", "longest"),
    [
        (None, 32768, 2 * AUTO_CTX_TOKENS, 2 * AUTO_CTX_TOKENS),
        (None, 2048, 4096, 2048),
        (2, 32768, 2 * AUTO_CTX_TOKENS, 2 * AUTO_CTX_TOKENS),
        (1, 32768, AUTO_CTX_TOKENS, AUTO_CTX_TOKENS),
        (32, 2048, 4096, 2048),
    ],
)
def test_a_servers_automatic_pool_holds_two_long_sequences_however_many_share_it(
    dense: ModelInfo, parallel: int | None, trained: int, pool: int, longest: int
) -> None:
    plan = place(replace(dense, n_ctx_train=trained), LAPTOP, served(LoadConfig(), parallel))
    assert (plan.n_ctx, plan.max_sequence_tokens) == (pool, longest)
    assert plan.n_slots == (8 if parallel is None else parallel) + 4 + 1


def test_a_servers_context_that_was_asked_for_is_kept(dense: ModelInfo) -> None:
    assert place(dense, LAPTOP, served(LoadConfig(ctx=3000))).n_ctx == 3000


def test_wishes_win_over_what_would_be_chosen(dense: ModelInfo) -> None:
    plan = place(dense, LAPTOP, LoadConfig(threads=7, flash_attn="off", ctx=512, retained=0))
    assert (plan.n_threads, plan.flash_attn, plan.n_ctx, plan.n_slots) == (7, "off", 512, 2)


def test_quantised_v_turns_flash_attention_on_or_is_refused_with_both_ways_out(dense: ModelInfo) -> None:
    assert place(dense, LAPTOP, LoadConfig(kv=KvTypes("q8_0", "q8_0"))).flash_attn == "on"
    assert place(dense, LAPTOP, LoadConfig(kv=KvTypes("q8_0", "f16"), flash_attn="off")).flash_attn == "off"
    with pytest.raises(UsageError) as refused:
        place(dense, LAPTOP, LoadConfig(kv=KvTypes("q8_0", "q8_0"), flash_attn="off"))
    assert "--flash-attn on" in refused.value.hint
    assert "--kv" in refused.value.hint


@pytest.mark.parametrize("n_ctx", [1, 2, 3])
def test_the_shortest_context_still_has_a_row_for_every_slot(dense: ModelInfo, n_ctx: int) -> None:
    plan = place(dense, LAPTOP, LoadConfig(ctx=n_ctx))
    assert min(plan.n_ctx, plan.n_batch, plan.n_ubatch) >= plan.n_slots
    assert plan.max_sequence_tokens == n_ctx


def test_too_many_sequences_are_refused(dense: ModelInfo) -> None:
    with pytest.raises(UsageError, match="256"):
        place(dense, LAPTOP, LoadConfig(parallel=250, retained=6))


def test_no_memory_is_refused_before_loading_with_the_numbers(dense: ModelInfo) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        place(dense, replace(LAPTOP, available_bytes=10_000_000))
    assert refused.value.details["available_bytes"] == 10_000_000
    big = replace(LAPTOP, available_bytes=110_000_000)
    fits = place(dense, big).n_ctx
    assert 0 < fits < AUTO_CTX_TOKENS
    assert "cut" in place(dense, big).notes[1]
    with pytest.raises(NotEnoughMemory, match="32,768"):
        place(dense, big, LoadConfig(ctx=32768))  # asked for: never shrunk silently


def test_weights_are_not_repacked_where_that_crashes_or_does_not_fit(dense: ModelInfo) -> None:
    plan = place(dense, replace(LAPTOP, repacking_is_safe=False))
    assert not plan.repack
    assert "AMX" in plan.notes[1]


def test_gpu_off_and_auto_without_a_gpu_stay_on_the_cpu(dense: ModelInfo) -> None:
    assert place(dense, with_gpu(8 * GB), LoadConfig(gpu="off")).n_gpu_layers == 0
    assert place(dense, LAPTOP, LoadConfig(gpu="auto")).n_gpu_layers == 0


@pytest.mark.parametrize("wish", ["all", 3])
def test_a_gpu_that_is_not_there_is_refused_not_ignored(dense: ModelInfo, wish: object) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        place(dense, LAPTOP, LoadConfig(gpu=wish))  # type: ignore[arg-type]


def test_gpu_layers_follow_the_wish_and_the_free_memory(dense: ModelInfo) -> None:
    every = dense.n_layers + 1
    assert place(dense, with_gpu(8 * GB), LoadConfig(gpu="all")).n_gpu_layers == every
    assert place(dense, with_gpu(8 * GB), LoadConfig(gpu="auto")).n_gpu_layers == every
    assert place(dense, with_gpu(8 * GB), LoadConfig(gpu=1)).n_gpu_layers == 1
    assert place(dense, with_gpu(8 * GB), LoadConfig(gpu=999)).n_gpu_layers == every
    assert place(dense, with_gpu(1000), LoadConfig(gpu="auto")).n_gpu_layers == 0
    note = place(dense, with_gpu(8 * GB), LoadConfig(gpu=1)).notes[0]
    assert note == f"1/{dense.n_layers} layers on CUDA0, KV f16 on CUDA0 and CPU"
