"""Runs as JSON documents: the field names and units of vLLM's serving benchmark, and what we add to them.

Every `*_ms` is in milliseconds; `duration` and the lists `ttfts`, `answer_ttfts`, `tpots`, `itls`, `latencies`,
`start_times`, `queue_times`, `server_queue_times` are in seconds, one entry a counted request. null = not
measured or not told. No value is NaN or infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.latencies import Distribution, answer_ttft_ms, itl_ms, queue_ms, tpot_ms, ttft_ms
from localllm.bench.measures import LATENCIES, measure
from localllm.bench.serving.result import RunResult, Sample
from localllm.bench.serving.summary import RunSummary, summarise_run

Document: TypeAlias = Mapping[str, Any]

BACKENDS = {"openai-chat": "openai-chat", "openai-completions": "openai"}
LATENCY_FIELDS = {name: "e2el" if name == "e2e" else name for name in LATENCIES}
"""How the files name a latency, by its name in measures.py."""

SCALAR_FIELDS = {"peak_memory": "peak_memory_bytes", "ready": "ready_ms"}
"""How they name another measure, where by another name."""

MAX_ERROR_CHARS = 200
_PLACES = 7  # of a second: finer than any clock here


def run_document(result: RunResult) -> dict[str, Any]:
    """Return one run as a document of plain values."""
    summary = summarise_run(result)
    counted = [sample for sample in result.samples if sample.outcome.end is not End.CANCELLED]
    found = {
        **_head(result, summary),
        **_totals(summary),
        **_statistics(summary.latencies),
        **_drafts(summary),
        **_details(counted),
        **_settings(result),
        **_costs(result, summary),
    }
    return _plain_mapping(found)


def serve_document(
    results: Sequence[RunResult],
    *,
    fingerprint: Mapping[str, Any],
    calibration: Any = None,
    knee: Any = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Return one `bench serve` as a document: the first run's fields, then every run, then what they ran on.

    `calibration` and `knee`: a dataclass, a mapping or None.
    """
    runs = [run_document(result) for result in results]
    head = {"localllm_bench_serve": 1, "partial": partial or any(run["partial"] for run in runs)}
    rest = {"runs": runs, "knee": knee, "fingerprint": fingerprint, "calibration": calibration}
    return head | {k: v for k, v in (runs[0] if runs else {}).items() if k not in head} | _plain_mapping(rest)


def run_value(run: Document, name: str) -> float | None:
    """Return a measure of a run's document by its name in measures.py, in its own unit; None where it is not there.

    Raises: UsageError where measures.py has no such name.
    """
    of = measure(name)
    if of.statistic:
        found = run.get(f"{of.statistic}_{LATENCY_FIELDS[of.base]}_ms")
    else:
        found = run.get(SCALAR_FIELDS.get(name, name))
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def is_used(run: Document) -> bool:
    """Say whether a run counts: supported, undisturbed, with an answer or a failure to show."""
    n_requests = (run.get("completed") or 0) + (run.get("failed") or 0)
    return not run.get("disturbances") and not run.get("unsupported") and n_requests > 0


def json_text(document: Document) -> str:
    """Return a document as strict JSON, keys in their order, a list of plain values on one line."""
    return "".join(_json_lines(plain(document), "")) + "\n"


def plain(value: Any) -> Any:
    """Return `value` in what JSON has: no dataclass, enum, path, set; no NaN or infinity (null); no lone surrogate."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Path):
        return plain(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _plain_mapping(asdict(value))
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(str(value))


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {plain(str(key)): plain(item) for key, item in value.items()}


def _json_lines(value: Any, indent: str) -> Iterator[str]:
    inner = indent + " "
    if isinstance(value, dict) and value:
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' if number else '{'}\n{inner}{_json(key)}: "
            yield from _json_lines(item, inner)
        yield f"\n{indent}}}"
    elif isinstance(value, list) and any(isinstance(item, dict) and item for item in value):
        for number, item in enumerate(value):
            yield f"{',' if number else '['}\n{inner}"
            yield from _json_lines(item, inner)
        yield f"\n{indent}]"
    else:
        yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _head(result: RunResult, summary: RunSummary) -> dict[str, Any]:
    load = result.spec.load
    return {
        "date": datetime.fromisoformat(result.began_at).strftime("%Y%m%d-%H%M%S"),
        "backend": BACKENDS[result.api],
        "endpoint_type": BACKENDS[result.api],
        "model_id": result.model,
        "tokenizer_id": result.model,
        "num_prompts": summary.n_requests,
        "request_rate": "inf" if load.rate_per_s is None else load.rate_per_s,
        "burstiness": load.shape,
        "max_concurrency": load.concurrency,
    }


def _totals(summary: RunSummary) -> dict[str, Any]:
    tokens, value = summary.output_tokens, summary.value
    return {
        "duration": summary.duration_s,
        "completed": summary.n_answers,
        "failed": summary.n_requests - summary.n_answers,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": value("request_throughput"),
        "request_goodput": value("request_goodput"),
        "output_throughput": value("output_throughput"),
        "total_token_throughput": value("total_token_throughput"),
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }


def _statistics(latencies: Mapping[str, Distribution]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, field in LATENCY_FIELDS.items():
        of = latencies.get(name)
        found[f"mean_{field}_ms"] = None if of is None else of.mean
        found[f"median_{field}_ms"] = None if of is None else of.p50
        # vLLM's is the population's
        found[f"std_{field}_ms"] = None if of is None else of.stdev * math.sqrt((of.n - 1) / of.n)
        for statistic in ("min", "p50", "p90", "p95", "p99", "max"):
            found[f"{statistic}_{field}_ms"] = None if of is None else of.at(statistic)
    return found


def _drafts(summary: RunSummary) -> dict[str, Any]:
    share = summary.value("accepted_share")
    return {
        "spec_decode_acceptance_rate": None if share is None else 100 * share,
        "spec_decode_draft_tokens": summary.drafted_tokens,
        "spec_decode_accepted_tokens": summary.accepted_draft_tokens,
    }


def _details(counted: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return a list entry for each counted request. As in vLLM's files, a length or time that is not known is 0.

    `start_times`: when each was due, from when the first was; `queue_times`: from there until it was sent.
    """
    outcomes = [sample.outcome for sample in counted]
    begun_s = min((outcome.due_s for outcome in outcomes), default=0.0)
    return {
        "input_lens": [outcome.prompt_tokens or 0 for outcome in outcomes],
        "output_lens": [s.output_tokens if s.outcome.end is End.ANSWER else 0 for s in counted],
        "ttfts": [_seconds(ttft_ms(outcome)) or 0.0 for outcome in outcomes],
        "answer_ttfts": [_seconds(answer_ttft_ms(outcome)) for outcome in outcomes],
        "tpots": [_seconds(tpot_ms(s.outcome, s.output_tokens)) for s in counted],
        "itls": [[_seconds(gap_ms) for gap_ms in itl_ms(outcome)] for outcome in outcomes],
        "latencies": [round(outcome.ended_s - outcome.due_s, _PLACES) for outcome in outcomes],
        "start_times": [round(outcome.due_s - begun_s, _PLACES) for outcome in outcomes],
        "queue_times": [round(outcome.started_s - outcome.due_s, _PLACES) for outcome in outcomes],
        "server_queue_times": [_seconds(queue_ms(outcome)) for outcome in outcomes],
        "errors": [_error(outcome) for outcome in outcomes],
        "ends": [outcome.end.value for outcome in outcomes],
        "kinds": [sample.kind for sample in counted],
    }


def _settings(result: RunResult) -> dict[str, Any]:
    spec = result.spec
    return {
        "workload": spec.workload.spec,
        "workload_facts": spec.workload.facts,
        "seed": spec.seed,
        "cache": spec.cache.value,
        "load": {
            "concurrency": spec.load.concurrency,
            "rate_per_s": spec.load.rate_per_s,
            "shape": spec.load.shape,
        },
        "answers": "filled" if spec.fills_length else "natural",
        "began_at": result.began_at,
        "token_source": result.token_source,
        "n_warmup": result.n_warmed_up,
        "api": result.api,
        "server": result.server,
    }


def _costs(result: RunResult, summary: RunSummary) -> dict[str, Any]:
    found, value = result.resources, summary.value
    return {
        "error": value("error"),
        "errors_by_code": summary.n_by_error,
        "n_cancelled": summary.n_cancelled,
        "goodput": value("goodput"),
        "slo": _slo(result, summary),
        "cached_tokens": summary.cached_tokens,
        "cached_share": value("cached_share"),
        "accepted_share": value("accepted_share"),
        "valid_share": value("valid_share"),
        "n_over_limit": summary.n_over_limit,
        "ready_ms": value("ready"),
        "peak_memory_bytes": found.peak_memory_bytes,
        "memory_kind": found.memory_kind,
        "joules": found.joules,
        "joules_per_token": value("joules_per_token"),
        "joules_of": found.joules_of,
        "server_cpu_s": found.server_cpu_s,
        "client_cpu_ms_per_token": summary.client_cpu_ms_per_token,
        "disturbances": found.disturbances,
        "unseen": found.unseen,
        "unsupported": result.unsupported,
        "notes": result.notes,
        "partial": result.partial,
    }


def _slo(result: RunResult, summary: RunSummary) -> dict[str, Any] | None:
    slo = result.spec.slo
    if slo is None:
        return None
    verdicts = slo.verdicts(summary.value)
    met = all(verdict["met"] for verdict in verdicts) if summary.n_requests else None
    return {"text": slo.text, "verdicts": verdicts, "met": met}


def _error(outcome: Outcome) -> str:
    if outcome.end is End.ANSWER:
        return ""
    why = outcome.error_message or outcome.error_code or outcome.fault
    return f"{outcome.end.value}: {why}"[:MAX_ERROR_CHARS] if why else outcome.end.value


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms / 1e3, _PLACES)
