"""Memory: exact where the header decides (against llama.cpp's own report), near where it is fitted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.backends.cpu.probe import probe
from localllm.errors import NotEnoughMemory
from localllm.models.available import available_bytes, total_bytes
from localllm.models.gguf import TensorInfo
from localllm.models.gguf.types import TENSOR_TYPES
from localllm.models.info import ModelInfo, read_info
from localllm.models.kv_types import KvTypes
from localllm.models.layers import Layer
from localllm.models.memory import (
    ContextShape,
    estimate,
    kv_bytes,
    kv_bytes_per_token,
    largest_ctx,
    require,
    state_bytes,
)
from localllm.models.repack import repacked_bytes, repacked_types
from tests.models.ggufs import U32, key, small_model
from tests.tiny_models import TINY

MIB = 2**20
PLAIN = ContextShape()


@pytest.fixture
def dense(tmp_path: Path) -> ModelInfo:
    return read_info(small_model().write(tmp_path / "dense.gguf"))


def with_layers(info: ModelInfo, *layers: Layer, window: int = 0) -> ModelInfo:
    return replace(info, layers=layers, window_tokens=window)


def test_8b_llama_3_at_10240_tokens_is_1342_mb_of_kv(dense: ModelInfo) -> None:
    layer = Layer(32, 8, 128, 128, k_values=1024, v_values=1024)
    llama = with_layers(dense, *[layer] * 32)
    assert kv_bytes(llama, 10_240) == 1_342_177_280
    assert kv_bytes_per_token(llama) == 131_072
    assert kv_bytes_per_token(llama, KvTypes("q8_0", "q8_0")) == 131_072 * 17 // 32
    assert kv_bytes_per_token(llama, KvTypes("q8_0", "f16")) == 65_536 * 17 // 32 + 65_536


def test_window_layers_hold_a_window_a_slot_and_a_batch(dense: ModelInfo) -> None:
    full, window = Layer(1, 1, 64, 64, 64, 64), Layer(1, 1, 64, 64, 64, 64, is_windowed=True)
    info = with_layers(dense, full, window, window=512)
    cell = 64 * 2 * 2
    assert kv_bytes(info, 8192, ContextShape(n_ubatch=128)) == cell * (8192 + 1280)
    assert kv_bytes(info, 8192, ContextShape(n_ubatch=512)) == cell * (8192 + 1536)
    assert kv_bytes(info, 300, ContextShape(n_ubatch=512)) == cell * (512 + 512)
    assert kv_bytes(info, 8192, ContextShape(n_ubatch=128, swa_full=True)) == cell * 2 * 8192


def test_snapshots_cost_state_only_where_the_architecture_has_them(dense: ModelInfo) -> None:
    info = with_layers(dense, Layer(1, 0, 64, 64, conv_values=100, state_values=900))
    assert state_bytes(info, ContextShape(n_slots=3)) == 12_000
    assert state_bytes(info, ContextShape(n_slots=3, n_rs_seq=4)) == 12_000
    assert state_bytes(replace(info, can_roll_back_state=True), ContextShape(n_slots=3, n_rs_seq=4)) == 60_000


def test_total_is_the_sum_of_its_terms_or_the_peak_of_loading(dense: ModelInfo) -> None:
    small = estimate(dense, 256, ContextShape(n_ubatch=64))
    assert small.running_bytes == sum(
        (
            small.weights_bytes,
            small.repacked_bytes,
            small.kv_bytes,
            small.state_bytes,
            small.compute_bytes,
            small.output_bytes,
            small.vocabulary_bytes,
            small.process_bytes,
        )
    )
    assert small.total_bytes == small.running_bytes
    heavy = estimate(replace(dense, size_bytes=10**9), 256)
    assert heavy.total_bytes == heavy.load_peak_bytes > 10**9


@pytest.mark.parametrize(
    ("n_ctx", "more"),
    [
        (2048, PLAIN),
        (1024, replace(PLAIN, n_slots=8)),
        (1024, replace(PLAIN, n_ubatch=1024)),
        (1024, replace(PLAIN, flash_attn=False)),
    ],
)
def test_more_of_anything_takes_more(n_ctx: int, more: ContextShape, dense: ModelInfo) -> None:
    assert estimate(dense, n_ctx, more).total_bytes > estimate(dense, 1024, PLAIN).total_bytes


def test_largest_context_just_fits(dense: ModelInfo) -> None:
    info = replace(dense, n_ctx_train=2**32 - 1)
    for budget in (100_000_000, 1_000_000_000, 50_000_000_000):
        fits = largest_ctx(info, budget)
        assert fits % 256 == 0
        assert estimate(info, fits).total_bytes <= budget
        assert estimate(info, fits + 256).total_bytes > budget
    assert largest_ctx(info, 1_000) == 0
    assert largest_ctx(dense, 10**12) == dense.n_ctx_train


def test_refusal_names_need_available_and_what_fits(dense: ModelInfo) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        require(dense, 1_000_000, PLAIN, available_bytes=1_000_000_000)
    fits = largest_ctx(dense, 900_000_000)
    assert caught.value.details["largest_ctx"] == fits > 0
    assert caught.value.details["available_bytes"] == 1_000_000_000
    assert caught.value.details["needed_bytes"] > 900_000_000
    assert "1.00 GB is available" in caught.value.message
    assert f"--ctx {fits}" in caught.value.hint
    assert caught.value.exit_code == 4


def test_refusal_without_any_context_that_fits_says_so(dense: ModelInfo) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        require(dense, 256, PLAIN, available_bytes=1_000_000)
    assert caught.value.details["largest_ctx"] == 0
    assert "--ctx" not in caught.value.hint


def test_what_fits_is_returned(dense: ModelInfo) -> None:
    assert require(dense, 256, PLAIN, available_bytes=10**12) == estimate(dense, 256)


# Against llama.cpp's own report.


def native(path: Path, *options: object) -> dict[str, float]:
    script = Path(__file__).with_name("native_sizes.py")
    done = subprocess.run(
        [sys.executable, script, path, *map(str, options)], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


ROUNDED = 0.011 * MIB
"""The report has two digits after the point, and there are at most two lines a kind."""


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kv", ["f16:f16", "q8_0:q4_0"])
def test_exact_terms_are_what_llama_cpp_allocates(name: str, kv: str, tiny: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tiny / f"{name}.gguf"
    types, unified = KvTypes.parse(kv), kv == "f16:f16"
    if read_info(path).reads_v_from_k:
        types = KvTypes(types.k, types.k)
    real = native(path, 1000, 3, 64, types.k, types.v, int(unified), 4, 0)
    info = read_info(path)
    shape = ContextShape(kv=types, n_slots=3, n_ubatch=64, kv_unified=unified, n_rs_seq=4)
    ours = estimate(info, 1000, shape)
    assert real["loaded"]
    assert ours.kv_bytes == pytest.approx(real.get("KV", 0) * MIB, abs=ROUNDED)
    assert ours.state_bytes == pytest.approx(real.get("RS", 0) * MIB, abs=ROUNDED)
    assert ours.weights_bytes == pytest.approx(real["mapped"] * MIB, abs=ROUNDED)
    assert info.n_params == real["n_params"]


@pytest.mark.real
@pytest.mark.parametrize("repack", [False, True])
def test_weights_and_copies_of_the_real_model_are_what_llama_cpp_reports(smollm2: Path, repack: bool) -> None:
    real = native(smollm2, 512, 2, 128, "f16", "f16", 1, 0, int(repack))
    if repack and real["amx_build"]:
        pytest.skip("a library with AMX is not let repack")
    repacked = repacked_types(probe().features) if repack else frozenset[str]()
    ours = estimate(read_info(smollm2), 512, ContextShape(n_ubatch=128, repacked=repacked))
    assert ours.kv_bytes == real["KV"] * MIB
    assert ours.weights_bytes == pytest.approx(real["mapped"] * MIB, abs=ROUNDED)
    assert ours.repacked_bytes == pytest.approx(real.get("copied", 0) * MIB, abs=ROUNDED)


# Repacking.


def weight(type_name: str, shape: tuple[int, ...], name: str = "blk.0.ffn_up.weight") -> TensorInfo:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == type_name)
    n_values = 1
    for size in shape:
        n_values *= size
    return TensorInfo(name, shape, kind, 0, n_values // kind.block_values * kind.block_bytes)


def test_copies_depend_on_type_shape_and_cpu() -> None:
    avx2, avx512 = repacked_types(frozenset({"avx2"})), repacked_types(frozenset({"avx2", "avx512f"}))
    assert repacked_types(frozenset()) == frozenset()
    for types in (avx2, avx512):
        weights = weight("Q4_0", (256, 32))
        assert repacked_bytes(weights, types) == weights.n_bytes
        assert repacked_bytes(weight("Q8_0", (256, 32)), types) == 0
        assert repacked_bytes(weight("Q4_0", (256, 4)), types) == 0
        assert repacked_bytes(weight("Q4_0", (256, 32), "token_embd.weight"), types) == 0
    assert repacked_bytes(weight("Q2_K", (256, 32)), avx2) == 0
    assert repacked_bytes(weight("Q2_K", (256, 32)), avx512) > 0
    arm = repacked_types(frozenset({"asimddp"})), repacked_types(frozenset({"asimddp", "i8mm"}))
    assert [repacked_bytes(weight("Q8_0", (256, 32)), types) > 0 for types in arm] == [False, True]


# What is available.


def fake_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_machine_without_limits_gives_what_the_kernel_says(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n"})
    assert (available_bytes(root), total_bytes(root)) == (8_192_000_000, 16_384_000_000)


def test_the_tightest_control_group_counts_and_its_file_cache_is_free(tmp_path: Path) -> None:
    root = fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "3000000000\n",
            "sys/fs/cgroup/outer/inner/memory.current": "500000000\n",
            "sys/fs/cgroup/outer/memory.max": "2000000000\n",
            "sys/fs/cgroup/outer/memory.current": "1500000000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 300000000\nactive_file 200000000\n",
        },
    )
    assert (available_bytes(root), total_bytes(root)) == (1_000_000_000, 2_000_000_000)


def test_control_groups_of_version_1_count_too(tmp_path: Path) -> None:
    root = fake_machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000000\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400000000\n",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 100000000\n",
        },
    )
    assert (available_bytes(root), total_bytes(root)) == (700_000_000, 1_000_000_000)


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 0
    assert total_bytes(tmp_path) >= available_bytes(tmp_path)


def test_address_space_limit_counts() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from localllm.models.available import available_bytes; print(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 2**30


def test_absurd_context_of_a_header_is_bounded_by_memory(tmp_path: Path) -> None:
    file = small_model(context_length=key("llama.context_length", U32, 2**32 - 1))
    info = read_info(file.write(tmp_path / "m.gguf"))
    assert 0 < largest_ctx(info, 500_000_000) < 10**7
