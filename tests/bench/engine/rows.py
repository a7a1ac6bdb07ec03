"""Rows made up for tests."""

from __future__ import annotations

from localllm.bench.engine.rows import Case, EngineFacts, Row

FACTS = EngineFacts(
    build_commit="abc1234",
    cpu_info="Some CPU",
    gpu_info="",
    backends="CPU",
    model_filename="/models/small.gguf",
    model_type="llama 135M Q4_1",
    model_size=98_000_000,
    model_n_params=134_515_008,
    n_batch=512,
    n_ubatch=512,
    n_threads=2,
    type_k="f16",
    type_v="f16",
    n_gpu_layers=0,
    flash_attn=-1,
    repack=True,
)
WHEN = "2026-01-02T03:04:05Z"

PREFILL = Row(Case(n_prompt=512), FACTS, WHEN, (1_000_000_000, 2_000_000_000))
DECODE = Row(
    Case(n_gen=128), FACTS, WHEN, (2_000_000_000,) * 5, extras={"bytes_per_token": 1e8, "bandwidth_share": 0.64}
)
DEEP = Row(Case(n_prompt=512, n_depth=512), FACTS, WHEN, (4_000_000_000,))
FOUR = Row(Case(n_gen=32, n_parallel=4), FACTS, WHEN, (1_000_000_000,), partial=True)
OVERHEAD = Row(
    Case(n_gen=48, n_depth=64),
    FACTS,
    WHEN,
    (1_000_000_000,),
    extras={
        "bare_avg_ns": 980_000_000,
        "bare_avg_ts": 48.98,
        "overhead_ratio": 0.981,
        "overhead_ratio_low": 0.97,
        "overhead_ratio_high": 0.99,
    },
)
OVERHEAD_FOUR = Row(
    Case(n_gen=24, n_depth=32, n_parallel=4),
    FACTS,
    WHEN,
    (1_000_000_000,),
    extras={
        "bare_avg_ns": 960_000_000,
        "bare_avg_ts": 100.0,
        "overhead_ratio": 0.96,
        "overhead_ratio_low": 0.95,
        "overhead_ratio_high": 0.97,
    },
)
START = Row(
    Case(n_prompt=35, kind="start"),
    FACTS,
    WHEN,
    (700_000_000, 720_000_000),
    is_rate=False,
    extras={
        "bare_avg_ns": 600_000_000,
        "start_ratio": 1.18,
        "start_ratio_low": 1.15,
        "start_ratio_high": 1.22,
        "peak_rss_bytes": 300_000_000,
        "bare_peak_rss_bytes": 259_000_000,
    },
)
ALL = (PREFILL, DECODE, DEEP, FOUR, OVERHEAD, OVERHEAD_FOUR, START)
