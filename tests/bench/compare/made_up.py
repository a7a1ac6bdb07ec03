"""Result files made up for tests, with the samples that a test wants in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MACHINE = {
    "cpu": {"name": "Some CPU", "features": ["avx2"], "n_usable": 4, "n_cores": 4},
    "ram_bytes": 16 << 30,
    "os": "Linux 6.1",
    "os_name": "Some Linux 12",
    "architecture": "x86_64",
}
SHA256 = "ab" * 32


def run(first_s: Sequence[float] | Floats, pace_s: Sequence[float] | Floats, **more: Any) -> dict[str, Any]:
    """Return a run of one client whose requests took `first_s` to their first token and `pace_s` a token."""
    n, n_tokens = len(first_s), 9
    gaps = [[float(pace)] * (n_tokens - 1) for pace in pace_s]
    ends = [float(first) + sum(row) for first, row in zip(first_s, gaps, strict=True)]
    starts = np.concatenate([[0.0], np.cumsum(ends)[:-1]])
    duration = float(np.sum(ends))
    found = {
        "model_id": "small",
        "workload": "chat",
        "cache": "cold",
        "load": {"concurrency": 1, "rate_per_s": None, "shape": 1.0},
        "seed": 1,
        "answers": "filled",
        "api": "openai-chat",
        "duration": duration,
        "completed": n,
        "failed": 0,
        "error": 0.0,
        "total_output_tokens": n * n_tokens,
        "output_throughput": n * n_tokens / duration,
        "request_throughput": n / duration,
        "input_lens": [],
        "output_lens": [n_tokens] * n,
        "ttfts": [float(first) for first in first_s],
        "tpots": [float(pace) for pace in pace_s],
        "itls": gaps,
        "latencies": ends,
        "start_times": [float(start) for start in starts],
        "errors": [""] * n,
        "disturbances": [],
        "partial": False,
    }
    return found | more


def serve(*runs: dict[str, Any], machine: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the document of a `bench serve` of these runs."""
    fingerprint = {
        "machine": machine or MACHINE,
        "software": {"python": "3.11.2", "llama-cpp-python": "0.3.36"},
        "model": {"name": "small", "sha256": [SHA256]},
        "fingerprint_id": "a" * 16 if machine is None else "b" * 16,
    }
    return {"localllm_bench_serve": 1, "partial": False, "runs": list(runs), "fingerprint": fingerprint} | more


def contract(rounds: Sequence[dict[str, Any]], candidate: str = "ours", **more: Any) -> dict[str, Any]:
    """Return the document of a `bench run` with one candidate and one cell of these rounds."""
    cell = {
        "candidate": candidate,
        "workload": "chat",
        "cache": "cold",
        "load": "concurrency 1",
        "rounds": list(rounds),
    }
    fingerprint = {"machine": MACHINE, "software": {}, "fingerprint_id": "a" * 16}
    return {"localllm_bench_contract": 1, "partial": False, "cells": [cell], "fingerprint": fingerprint} | more


def row(n_prompt: int, n_gen: int, rates: Sequence[float], **more: Any) -> dict[str, Any]:
    """Return a row of llama-bench."""
    found = {
        "build_commit": "abc1234",
        "build_number": 7000,
        "cpu_info": "Some CPU",
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": "/models/small.gguf",
        "model_type": "llama 135M Q4_1",
        "model_size": 98_000_000,
        "model_n_params": 134_515_008,
        "n_batch": 512,
        "n_threads": 2,
        "type_k": "f16",
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": 0,
        "test_time": "2026-01-02T03:04:05Z",
        "avg_ns": 1_000_000,
        "avg_ts": float(np.mean(rates)) if len(rates) else 0.0,
        "samples_ns": [1_000_000] * len(rates),
        "samples_ts": [float(rate) for rate in rates],
    }
    return found | more


def vllm(first_s: Sequence[float] | Floats, pace_s: Sequence[float] | Floats, *, detailed: bool) -> dict[str, Any]:
    """Return a result of vLLM's serving benchmark, with or without an entry a request."""
    whole = run(first_s, pace_s, input_lens=[16] * len(first_s))
    names = ("model_id", "duration", "completed", "total_output_tokens", "output_throughput", "request_throughput")
    found = {name: whole[name] for name in names} | {
        "date": "20260102-030405",
        "backend": "openai-chat",
        "num_prompts": len(first_s),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 1,
        "median_ttft_ms": 1e3 * float(np.median(first_s)),
        "p99_ttft_ms": 1e3 * float(np.percentile(first_s, 99)),
        "median_tpot_ms": 1e3 * float(np.median(pace_s)),
        "p99_tpot_ms": 1e3 * float(np.percentile(pace_s, 99)),
    }
    if detailed:
        found |= {name: whole[name] for name in ("input_lens", "output_lens", "ttfts", "itls", "errors")}
        found["generated_texts"] = ["words"] * len(first_s)
    return found
