"""The generated pages hold what the result files hold, and nothing where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import docs.reliability
from docs.kept import MARK as KEPT_MARK
from docs.kept import with_kept
from docs.reliability import page
from docs.served import MARK, with_server
from proof.figures import Figure
from proof.kv_parts import Asked
from proof.load_run import growth_mb

HEAD: dict[str, Any] = {
    "date": "2026-01-02T03:04:05Z",
    "machine_line": "Some CPU, 2 of 4 cores",
    "git": {"commit": "abc", "dirty": True},
    "model": {"file": "small.gguf"},
    "settings": {"watchdog_s": 2, "clients": 8},
}
KIND = {
    "injected": 3,
    "survived": 2,
    "told_median_ms": 12.0,
    "told_max_ms": 2345.6,
    "good_answer_median_ms": 900.0,
    "good_answer_max_ms": None,
}
PART = {
    "engine": "fake",
    "kinds": {"SEGV": KIND},
    "requests": 77,
    "ends": {"answer": 70, "error_event": 7},
    "lost": 1,
    "fds": [20, 21],
    "threads": [4, 4],
    "left_processes": 0,
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(docs.reliability, "MEASURED", tmp_path)
    return tmp_path


def test_nothing_measured_is_no_section(measured: Path) -> None:
    assert "##" not in page().replace("# Reliability", "")


def test_faults(measured: Path) -> None:
    lines = [HEAD, {"fault": 1}, {"summary": [PART]}]
    (measured / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page()
    assert "| fake | SEGV | 2 of 3 | 0.01 s | 2.35 s | 0.90 s |  |" in text
    assert "| fake | 77 | 70 answer, 7 error event | 1 | 20 -> 21 | 4 -> 4 | 0 |" in text
    assert "2026-01-02T03:04:05Z, commit abc with changes. Some CPU, 2 of 4 cores. Model: small.gguf." in text


def test_load(measured: Path) -> None:
    latency = dict.fromkeys(("min", "p50", "p90", "p95", "p99", "max"), 1.25)
    parts = [{"rss_mb": 100.0 + i, "anonymous_mb": 50.0} for i in range(10)]
    found = HEAD | {
        "duration_s": 600.0,
        "requests": 5,
        "ends": {"answer": 4, "cancelled": 1},
        "bad": {"lost 200 cut": 1},
        "n_history": 0,
        "ttft_ms": latency,
        "itl_ms": None,
        "memory_by_part": {"server": parts},
        "growth_mb": {"server": growth_mb(parts)},
        "fds": {"server": [9, 9]},
        "threads": {"server": [3, 4]},
    }
    (measured / "load.json").write_text(json.dumps(found))
    text = page()
    assert "600 s, 5 requests: 4 answer, 1 cancelled." in text
    assert "Errors other than 429, 503 and 499: 1 x lost 200 cut." in text
    assert "| server | 100.0 | 101.0 | 102.0 |" in text
    assert "| 109.0 | 7.0 |" in text
    assert "| server | 9 -> 9 | 3 -> 4 |" in text


def test_canary(measured: Path) -> None:
    found = HEAD | {
        "sent": 4,
        "kinds": 70,
        "found": 1,
        "told_back": 3,
        "where": [{"where": "log", "place": "serve.log", "canary": "00001", "request": "stop"}],
        "places": {"log": 2},
        "servers": [{"statuses": {"200": 1, "400": 1}}, {"statuses": {"400": 2}}],
    }
    (measured / "canary.json").write_text(json.dumps(found))
    text = page()
    assert "4 canaries sent, answered 1 with 200, 3 with 400; **found: 1**." in text
    assert "| log | serve.log | stop |" in text


def test_kills_of_writers(measured: Path) -> None:
    run = {
        "kills": 100,
        "amid_a_file": 40,
        "blocks_read": 1234,
        "bytes_read": 5_600_000_000,
        "wrong_blocks": 1,
        "half_files": 2,
        "set_aside": 3,
        "partial_left": 9,
        "partial_after_sweep": 4,
    }
    found = HEAD | {
        "settings": {"budget_bytes": 48 << 20, "most_delay_s": 0.25},
        "runs": {"at random": run},
        "damaged": 200,
        "damaged_believed": 7,
    }
    (measured / "kv_kills.json").write_text(json.dumps(found))
    text = page()
    assert "one folder of 48 MB" in text
    assert "| at random | 100 | 40 | 1234 | 5.6 GB | 1 | 5 | 5 of 9 |" in text
    assert "200 files, of which believed: **7**." in text


def served() -> dict[str, Any]:
    line = {
        "side": "other",
        "tokens_per_s": 50.0,
        "decode_tokens_per_s_each": 20.0,
        "ttft_ms": 300.0,
        "speed_ratio": [1.5, 1.4, 1.6],
        "decode_ratio": [1.0, 0.9, 1.1],
    }
    return HEAD | {
        "settings": {"prompt_tokens": 100, "gen_tokens": 128, "pairs": 16, "rounds": 8},
        "figures": [
            Figure("a figure", 0.97, True, 0.981, "", 0.97, 0.99, 16).line(),
            Figure("b", 5, False, 7.5, "ms").line(),
        ],
        "bursts": {"4": {"table": [line]}},
        "left_out": {"llama-server": "not given"},
        "stop": {"ends": ["answer", "error_event draining"], "new_work": "refused 503", "exit_code": 143},
    }


def test_the_servers_sections_replace_those_before() -> None:
    once = with_server("# Benchmarks\n\nengine\n", [served()])
    assert with_server(once, [served()]) == once
    assert once.startswith(f"# Benchmarks\n\nengine\n\n{MARK}\n\n## Served: small.gguf")
    assert "| a figure | >= 0.97 | 0.981 | 0.97 to 0.99 | 16 | reached |" in once
    assert "| b | <= 5 ms | 7.5 |  | 1 | missed |" in once
    assert "| other | 50.0 | 20.0 | 300.0 | 1.500 (1.400 to 1.600) | 1.000 (0.900 to 1.100) |" in once
    assert "Left out: llama-server: not given." in once
    assert with_server(once, []) == "# Benchmarks\n\nengine\n"


def kept() -> dict[str, Any]:
    sides = {
        "localllm serve": {"median": 61.23, "low": 60.0, "high": 62.0, "n": 5},
        "other": {"median": 9100.0, "low": 9000.0, "high": 9200.0, "n": 1},
    }
    settings = {"ctx": 16384, "rounds": 5, "others": 1, "pairs": 16, "fill": 100}
    return HEAD | {
        "settings": {**settings, "LOCALLLM_KV_RAM": "1GB", "LOCALLLM_KV_DISK": "4GB"},
        "figures": [
            Figure("a restart", 0.03, False, 0.02, "", 0.01, 0.04, 6).line(),
            Asked("pool use", 0.96, at_least=True).missed("room was never short"),
        ],
        "beside": [
            {"what": "again", "unit": "ms", "sides": sides},
            {"what": "told by ours alone", "unit": "", "sides": {"localllm serve": sides["localllm serve"]}},
        ],
        "left_out": {"third": "not given"},
        "parts": {"hits": {"date": HEAD["date"], "git": None}, "pool": {"date": "later", "git": {"commit": "def"}}},
        "partial": False,
    }


def test_the_sections_on_kept_kv_follow_the_servers_and_replace_those_before() -> None:
    served_page = with_server("# Benchmarks\n\nengine\n", [served()])
    once = with_kept(served_page, [kept()])
    assert with_kept(with_server(once, [served()]), [kept()]) == once
    assert once.startswith(served_page.rstrip() + f"\n\n{KEPT_MARK}\n\n## Kept: small.gguf")
    assert "| a restart | <= 0.03 | 0.02 | 0.01 to 0.04 | 6 | reached |" in once
    assert "| pool use | >= 0.96 | none: room was never short |  | 0 | missed |" in once
    assert "Measured anew since then: pool, later, commit def." in once
    assert "|  | unit | localllm serve | other |" in once
    assert "| again | ms | 61.23 (n 5) | 9100 (n 1) |" in once
    assert "| told by ours alone |  | 61.23 (n 5) |  |" in once
    assert "Left out: third: not given." in once
    assert with_kept(once, []) == served_page


def test_cases_of_kept_kv(measured: Path) -> None:
    count = {"n": 20, "right": 18, "near": 1, "wrong": 1, "failed": 0, "cached_tokens": 700}
    count |= {"proof": "hits", "owed": 4, "proven": 3}
    control = {**count, "proof": ""}
    engines = [{"engine": "fake engine", "is_exact": True, "cases": {"an exact repeat": count, "control": control}}]
    (measured / "kv_cases.json").write_text(
        json.dumps(HEAD | {"engines": engines, "settings": {"n_top": 5, "drift_nats": 0.8}})
    )
    text = page()
    assert "| fake engine | an exact repeat | 18 of 20 | 1 | 1 | 0 | 700 | hits: 3 (4 asked) |" in text
    assert "| fake engine | control | 18 of 20 | 1 | 1 | 0 | 700 |  |" in text
    assert "within\n0.8 nats" in text
    assert "two models" not in text
