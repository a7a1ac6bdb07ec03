from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.bench.client.calls import End
from localllm.bench.measures import LATENCIES, SCALARS, STATISTICS
from localllm.bench.reports.document import json_text, plain, run_document, run_value, serve_document
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.spec import Load
from localllm.errors import UsageError
from tests.bench.client.made_up import measured, outcome, result, sample
from tests.bench.reports.made_up import FINGERPRINT, SLO, cold_and_warm, made_up_run, sweep

# What dashboards of vLLM's serving benchmark read, with the types that they rely on.
VLLM_TEXTS = ("date", "backend", "endpoint_type", "model_id", "tokenizer_id")
VLLM_COUNTS = (
    "num_prompts",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "max_concurrent_requests",
)
VLLM_NUMBERS = (
    "duration",
    "burstiness",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p90", "p95", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
)
VLLM_LISTS = {
    "input_lens": int,
    "output_lens": int,
    "ttfts": float,
    "itls": list,
    "latencies": float,
    "start_times": float,
    "queue_times": float,
    "errors": str,
}


def as_vllm_reads(text: str) -> dict[str, Any]:
    """Read a result file as a dashboard for vLLM's does, and fail where a field is not as vLLM writes it."""
    found: dict[str, Any] = json.loads(text)
    for name in VLLM_TEXTS:
        assert type(found[name]) is str, name
    for name in VLLM_COUNTS:
        assert type(found[name]) is int, name
    for name in VLLM_NUMBERS:
        assert type(found[name]) in (float, int), name
    for name, kind in VLLM_LISTS.items():
        assert all(type(item) is kind for item in found[name]), name
        assert len(found[name]) == found["num_prompts"], name
    assert found["request_rate"] == "inf" or type(found["request_rate"]) in (float, int)
    assert found["max_concurrency"] is None or type(found["max_concurrency"]) is int
    return found


def document(*results: RunResult, **fields: Any) -> dict[str, Any]:
    return serve_document(results, fingerprint=FINGERPRINT, **fields)


def test_a_reader_of_vllms_files_finds_every_name_with_its_type() -> None:
    for made in (cold_and_warm(), sweep(3), document(made_up_run(1, load=Load(rate_per_s=2.0, shape=0.5)))):
        as_vllm_reads(json_text(made))


def test_milliseconds_and_seconds_stand_where_vllm_has_them() -> None:
    samples = measured(4, 30)
    found = as_vllm_reads(json_text(document(made_up_run(4, n=30))))
    outcomes = [each.outcome for each in samples]
    ttfts_s = [of.token_s[0] - of.due_s for of in outcomes]
    assert found["ttfts"] == pytest.approx(ttfts_s, abs=1e-6)
    assert found["p95_ttft_ms"] == pytest.approx(1000 * np.percentile(ttfts_s, 95))
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(1000 * np.median(ttfts_s))
    assert found["std_ttft_ms"] == pytest.approx(1000 * np.std(ttfts_s))  # the population's, as in vLLM
    assert found["mean_e2el_ms"] == pytest.approx(1000 * np.mean([of.ended_s - of.due_s for of in outcomes]))
    gaps_s = [list(np.diff(of.token_s)) for of in outcomes]
    assert [len(itls) for itls in found["itls"]] == [len(gaps) for gaps in gaps_s]
    assert np.concatenate(found["itls"]) == pytest.approx(np.concatenate(gaps_s), abs=1e-6)
    assert found["p99_itl_ms"] == pytest.approx(1000 * np.percentile(np.concatenate(gaps_s), 99))


def test_a_request_can_be_laid_out_in_time_from_the_lists() -> None:
    found = run_document(made_up_run(6, n=12))
    begun_s = min(each.outcome.due_s for each in measured(6, 12))
    for i, each in enumerate(measured(6, 12)):
        of = each.outcome
        start_s = begun_s + found["start_times"][i]
        assert start_s + found["queue_times"][i] == pytest.approx(of.started_s, abs=1e-5)
        assert start_s + found["ttfts"][i] + sum(found["itls"][i]) == pytest.approx(of.token_s[-1], abs=1e-4)
        assert start_s + found["latencies"][i] == pytest.approx(of.ended_s, abs=1e-5)
        assert (found["input_lens"][i], found["output_lens"][i]) == (of.prompt_tokens, of.completion_tokens)


def test_how_requests_came_is_spelled_as_in_vllm() -> None:
    closed = run_document(made_up_run(1, load=Load(concurrency=8)))
    assert (closed["request_rate"], closed["max_concurrency"], closed["burstiness"]) == ("inf", 8, 1.0)
    opened = run_document(made_up_run(1, load=Load(rate_per_s=2.5, shape=0.5)))
    assert (opened["request_rate"], opened["max_concurrency"], opened["burstiness"]) == (2.5, None, 0.5)
    assert closed["date"] == "20260301-102030"
    assert (closed["backend"], run_document(result(api="openai-completions"))["backend"]) == ("openai-chat", "openai")


def test_failures_are_told_in_words_and_the_cancelled_are_left_out() -> None:
    found = run_document(
        result(
            sample(outcome(token_s=(10.5,), completion_tokens=1)),
            sample(outcome(End.REFUSED, status=429, error_code="queue_full", error_message="Too many.\n" * 99), 0),
            sample(outcome(End.LOST, fault="no answer"), 7),
            sample(outcome(End.TIMED_OUT), 0),
            sample(outcome(End.CANCELLED), 0),
        )
    )
    assert (found["completed"], found["failed"], found["num_prompts"], found["n_cancelled"]) == (1, 3, 4, 1)
    assert found["errors"][0] == ""
    assert found["errors"][1].startswith("refused: Too many.")
    assert len(found["errors"][1]) == 200
    assert found["errors"][2:] == ["lost: no answer", "timed_out"]
    assert found["ends"] == ["answer", "refused", "lost", "timed_out"]
    assert found["output_lens"] == [1, 0, 0, 0]
    assert (found["error"], found["errors_by_code"]) == (0.75, {"queue_full": 1})


def test_what_was_not_measured_is_null_and_json_stays_strict() -> None:
    made = document(result(), result(sample(outcome(End.UNREACHABLE), 0)))

    def forbid(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(json_text(made), parse_constant=forbid)
    assert (found["p95_ttft_ms"], found["output_throughput"], found["goodput"], found["slo"]) == (None,) * 4
    assert found["ttfts"] == []
    assert found["runs"][1]["ttfts"] == [0.0]
    assert found["runs"][1]["error"] == 1.0


def test_the_objective_is_written_with_its_verdicts() -> None:
    found = run_document(made_up_run(1, n_failed=1))
    assert found["slo"]["text"] == SLO
    assert [verdict["measure"] for verdict in found["slo"]["verdicts"]] == ["ttft_p95", "tpot_p95", "error"]
    assert found["slo"]["met"] is False
    assert run_document(result(spec=made_up_run(1).spec))["slo"]["met"] is None  # nothing was asked


def test_the_first_run_stands_flat_on_top_and_marks_come_first() -> None:
    made = document(made_up_run(1), made_up_run(2), partial=False)
    assert list(made)[:2] == ["localllm_bench_serve", "partial"]
    assert {key: made[key] for key in made["runs"][0] if key != "partial"} == {
        key: value for key, value in made["runs"][0].items() if key != "partial"
    }
    assert list(made)[-4:] == ["runs", "knee", "fingerprint", "calibration"]
    assert (made["knee"], made["fingerprint"]) == (None, FINGERPRINT)


def test_a_document_is_partial_where_a_run_of_it_is() -> None:
    assert document(made_up_run(1), made_up_run(2, partial=True))["partial"] is True
    assert document(made_up_run(1))["partial"] is False
    assert document(partial=True)["runs"] == []


def test_keys_keep_their_order_and_the_same_results_give_the_same_bytes() -> None:
    text = json_text(cold_and_warm())
    assert text == json_text(cold_and_warm()) == json_text(json.loads(text))
    assert text.count("\n") < 700  # lists stand on one line


def test_every_measure_is_found_in_a_document_by_its_name() -> None:
    run = run_document(made_up_run(3, n_failed=1))
    for name in [f"{base}_{statistic}" for base in LATENCIES for statistic in STATISTICS]:
        assert run_value(run, name) is not None, name
    silent = {"valid_share", "accepted_share", "ready"}
    assert {name for name in SCALARS if run_value(run, name) is None} == silent
    assert run_value(run, "peak_memory") == 412e6
    with pytest.raises(UsageError):
        run_value(run, "speed")


def test_plain_values_are_what_json_has() -> None:
    class Colour(Enum):
        RED = "red"

    @dataclass(frozen=True)
    class Found:
        where: Path
        share: float

    made = plain({1: Found(Path("a/b"), math.nan), "c": {3, 1}, "d": (Colour.RED, math.inf, True), "e": "\udc80"})
    assert made == {"1": {"where": "a/b", "share": None}, "c": ["1", "3"], "d": ["red", None, True], "e": "?"}
