"""Result documents as if measured, for tests of how they are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.bench.client.calls import End
from localllm.bench.machine.resources import Resources
from localllm.bench.reports.document import run_document, serve_document
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.sweep import knee
from localllm.bench.slo import parse_slo
from tests.bench.client.made_up import MadeUpWorkload, measured, outcome, sample

FINGERPRINT: dict[str, Any] = {
    "machine": {
        "cpu": {"name": "AMD EPYC 7763", "n_cores": 8, "n_usable": 8, "features": ["avx2", "fma"]},
        "governor": None,
        "ram_bytes": 16 << 30,
        "os": "Linux 6.1",
        "os_name": "Debian GNU/Linux 12",
        "architecture": "x86_64",
    },
    "software": {"python": "3.11.7", "localllm": "0.1.0", "llama-cpp-python": "0.3.36"},
    "server": {"server": "localllm", "version": {"version": "0.1.0"}},
    "model": {"name": "smollm2:135m", "quant": "Q4_K_M"},
    "load_average_before": [0.1, 0.2, 0.3],
    "load_average_after": [1.4, 0.6, 0.4],
    "fingerprint_id": "b1946ac92492d234",
}
CALIBRATION = {"cpu_ms_per_token": 0.031, "ttft_ms": 0.4, "itl_ms_p50": 0.02, "n_tokens": 4000}
SWAPPED = ("the machine swapped 12 MB",)
SLO = "ttft_p95=250ms,tpot_p95=30ms,error=0"


def made_up_run(
    seed: int,
    *,
    load: Load | None = None,
    cache: Cache = Cache.COLD,
    workload: str = "chat",
    n: int = 40,
    n_failed: int = 0,
    slo: str | None = SLO,
    pace_ms: float = 20.0,
    wait_ms: float = 60.0,
    rate: float = 4.0,
    **fields: Any,
) -> RunResult:
    spec = RunSpec(
        MadeUpWorkload(workload),
        load or Load(concurrency=1),
        cache,
        n_requests=n,
        slo=None if slo is None else parse_slo(slo),
        fills_length=True,
    )
    samples = measured(seed, n, pace_ms=pace_ms, wait_ms=wait_ms, rate=rate)
    samples += [
        sample(
            outcome(End.REFUSED, status=429, error_code="queue_full", due_s=100.5, started_s=100.5, ended_s=100.6), 0
        )
        for _ in range(n_failed)
    ]
    known: dict[str, Any] = {
        "resources": Resources(
            peak_memory_bytes=412_000_000, joules=88.0, joules_of=("cpu package",), server_cpu_s=9.5
        ),
        "client_cpu_s": 0.041,
        "n_warmed_up": 2,
        "server": {"server": "localllm", "version": {"version": "0.1.0"}},
    }
    return RunResult(
        spec=spec,
        api="openai-chat",
        model="smollm2:135m",
        samples=tuple(samples),
        began_at="2026-03-01T10:20:30+00:00",
        duration_s=10.0,
        **(known | fields),
    )


def cold_and_warm(**fields: Any) -> dict[str, Any]:
    """Return the document of a chat that was measured cold and warm."""
    runs = [
        made_up_run(1, n_failed=1, wait_ms=180.0),
        made_up_run(2, cache=Cache.WARM, notes=("the server lists 2 models; smollm2:135m was taken",)),
    ]
    return serve_document(runs, fingerprint=FINGERPRINT, calibration=CALIBRATION, **fields)


def sweep(n_loads: int = 7) -> dict[str, Any]:
    """Return the document of a sweep over clients, with its knee."""
    runs = []
    for step in range(n_loads):
        n_clients = 2**step
        slowed = 1 + max(0, n_clients - 8) / 6
        load = Load(concurrency=n_clients)
        rate = 1.2 * n_clients / slowed
        runs.append(made_up_run(step, load=load, wait_ms=50 * slowed, pace_ms=8 + 2.0 * slowed, rate=rate, n=50))
    found = knee(runs, parse_slo("ttft_p95=900ms"))
    return serve_document(runs, fingerprint=FINGERPRINT, calibration=CALIBRATION, knee=found)


def contract(loads: tuple[int, ...] = (1, 4, 16), n_rounds: int = 3, **fields: Any) -> dict[str, Any]:
    """Return the document of a contract with three candidates and two workloads."""
    candidates = {"localllm": (1.0, 1.0), "llama-server": (1.15, 1.05), "llama-server, best": (1.05, 0.97)}
    cells = []
    for workload, cache in (("chat", Cache.COLD), ("chat", Cache.WARM), ("rag:documents=2", Cache.WARM)):
        for n_clients in loads:
            for number, (name, (wait, pace)) in enumerate(candidates.items()):
                slowed = 1 + n_clients / 5
                rounds = [
                    made_up_run(
                        100 * number + 10 * n_clients + r,
                        load=Load(concurrency=n_clients),
                        cache=cache,
                        workload=workload,
                        wait_ms=wait * 60 * slowed * (0.5 if cache is Cache.WARM else 1),
                        pace_ms=pace * 12 * slowed,
                        rate=2.0 * n_clients / slowed,
                        n=24,
                        resources=Resources(disturbances=("the machine swapped 12 MB",))
                        if number == r == 1
                        else Resources(),
                    )
                    for r in range(n_rounds)
                ]
                documents = [run_document(found) for found in rounds]
                n_disturbed = sum(bool(found["disturbances"]) for found in documents)
                cells.append(
                    {
                        "candidate": name,
                        "workload": workload,
                        "cache": cache.value,
                        "load": str(Load(concurrency=n_clients)),
                        "rounds": documents,
                        "n_used": n_rounds - n_disturbed,
                        "n_disturbed": n_disturbed,
                    }
                )
    order = [
        {"candidate": "localllm", "value": 81.2, "ratio": 1.0, "low": 1.0, "high": 1.0, "tied": False},
        {
            "candidate": "llama-server, best",
            "value": 84.0,
            "ratio": 1.034,
            "low": 0.99,
            "high": 1.08,
            "tied": True,
        },
        {"candidate": "llama-server", "value": 95.5, "ratio": 1.176, "low": 1.11, "high": 1.24, "tied": False},
    ]
    known: dict[str, Any] = {
        "localllm_bench_contract": 1,
        "title": "A laptop's assistant",
        "partial": False,
        "contract": {"version": 1, "title": "A laptop's assistant", "run": {"rounds": n_rounds, "seed": 1}},
        "contract_sha256": "9f86d081884c7d65",
        "fingerprint": FINGERPRINT,
        "calibration": CALIBRATION,
        "candidates": [
            {
                "name": name,
                "model": "smollm2:135m",
                "command": ["llama-server", "-m", "model.gguf", "--port", "{port}"],
                "url": "",
                "server": {"server": "llama.cpp", "props": {"build_info": "b7000-abc"}},
                "ready_s": [0.9, 1.0, 1.2],
                "probes": {},
                "left_out": "",
            }
            for name in candidates
        ]
        + [
            {
                "name": "ollama",
                "model": "smollm2:135m",
                "command": None,
                "url": "http://127.0.0.1:11434",
                "server": {},
                "ready_s": [],
                "probes": {},
                "left_out": "nothing answers at http://127.0.0.1:11434",
            }
        ],
        "cells": cells,
        "differences": [
            {
                "what": "sampling defaults",
                "sentence": "llama-server samples with top_k 40 where localllm samples with none",
                "forbids_ranking": False,
            }
        ],
        "ranking": [
            {
                "model": "smollm2:135m",
                "workload": "chat",
                "cache": "cold",
                "load": "concurrency 4",
                "by": "ttft_p95",
                "order": order,
            }
        ],
        "no_ranking": "",
        "rules": [
            {
                "text": "localllm: ttft_p95 at most 250 ms (chat, cold, concurrency 4)",
                "measure": "ttft_p95",
                "is_ratio": False,
                "passed": True,
                "value": 181.0,
                "bound": 250.0,
                "why": "",
            },
            {
                "text": "localllm: tpot_p95 at most 1.05 that of llama-server (chat, cold, concurrency 4)",
                "measure": "tpot_p95",
                "is_ratio": True,
                "passed": False,
                "value": 1.12,
                "bound": 1.05,
                "why": "",
            },
        ],
        "passed": False,
    }
    return known | fields


HOSTILE = '<script>alert(\'x\')</script>"onload="y" ]]> </style> \x1b[31m| `z` [a](javascript:b)\u202e'


def hostile_serve() -> dict[str, Any]:
    """Return a document whose server, model and errors try to be markup."""
    run = made_up_run(
        1,
        workload=HOSTILE,
        notes=(HOSTILE,),
        resources=Resources(disturbances=(HOSTILE,)),
        server={"server": HOSTILE, "version": {"version": HOSTILE}},
    )
    failed = sample(outcome(End.ERROR_EVENT, error_message=HOSTILE, due_s=100.0, started_s=100.0, ended_s=101.0), 0)
    runs = [
        replace(run, model=HOSTILE, samples=(*run.samples, failed), unsupported=HOSTILE),
        replace(run, model=HOSTILE, samples=(*run.samples, failed), resources=Resources()),
    ]
    return serve_document(runs, fingerprint={**FINGERPRINT, "server": {HOSTILE: HOSTILE}})


def hostile_contract() -> dict[str, Any]:
    """Return a contract's document in which every text tries to be markup."""
    made = contract(loads=(1, 4), n_rounds=1)
    for cell in made["cells"]:
        cell["candidate"] = HOSTILE + cell["candidate"]
        cell["workload"] = HOSTILE
    for candidate in made["candidates"]:
        candidate |= {"name": HOSTILE, "model": HOSTILE, "command": [HOSTILE, HOSTILE], "left_out": HOSTILE}
    difference = {"what": HOSTILE, "sentence": HOSTILE, "forbids_ranking": True}
    rule = {"text": HOSTILE, "passed": False, "value": None, "bound": HOSTILE, "why": HOSTILE}
    return made | {
        "title": HOSTILE,
        "differences": [difference],
        "ranking": None,
        "no_ranking": HOSTILE,
        "rules": [rule],
        "contract": {HOSTILE: [HOSTILE, {"a": HOSTILE}]},
    }
