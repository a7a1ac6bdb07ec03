"""What `/metrics` says, read by Prometheus' own parser."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from localllm.errors import TimedOut
from localllm.runtime.events import Done, Error, Event, Finished, Token, Usage
from localllm.runtime.metrics import RuntimeStats
from localllm.server import histograms
from localllm.server.histograms import PART_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Histogram
from localllm.server.metrics import Metrics, Reading
from localllm.server.record import RequestRecord
from tests.fake_engine import fake_service
from tests.server.fakes import FakeSupervisor, FakeWorker, Running, serving

CHAT = "/v1/chat/completions"
NAMES = (
    *("requests", "requests_running", "requests_waiting", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "queue_time_seconds", "prefill_seconds"),
    *("decode_seconds", "template_seconds", "tokenise_seconds", "match_seconds", "restore_seconds", "sample_seconds"),
    *("ipc_seconds", "prompt_tokens", "generation_tokens", "prefix_cache_queries_tokens", "prefix_cache_hits_tokens"),
    *("spec_draft_tokens", "spec_accepted_tokens", "preemptions", "recomputed_tokens", "evictions"),
    *("kv_cache_usage_ratio", "memory_bytes", "model_loaded"),
)


def a_record(model: str = "m", *, code: int = 200, route: str = CHAT, error: str = "") -> RequestRecord:
    record = RequestRecord("r", route, model=model, started_s=10.0, code=code)
    batch: list[Event] = [Finished(0, "stop")]
    batch += [Error(error, "m")] if error else [Usage(5, 2, {"device": 1}, timings_ms={"queue": 4.0, "sample": 0.3})]
    record.see([Token(0, "a", (1,))], 10.2)
    record.see([Token(0, "b", (2,)), *batch, Done()], 10.23)
    record.end(10.5)
    return record


def parsed(page: str) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(page))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family told twice"
    return {family.name: family for family in families}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    (found,) = [s.value for s in family.samples if s.name == family.name + suffix and s.labels == labels]
    return float(found)


def check_histograms(families: Iterable[Metric]) -> int:
    """Check each histogram series: buckets rise, the last one is the count. Returns the observations in all."""
    n_all = 0
    for family in families:
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], dict[str, list[float]]] = {}
        for s in family.samples:
            key = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
            series.setdefault(key, {}).setdefault(s.name.removeprefix(family.name), []).append(s.value)
        for parts in series.values():
            buckets = parts["_bucket"]
            assert buckets == sorted(buckets)
            assert [buckets[-1]] == parts["_count"]
            assert len(parts["_sum"]) == 1
            n_all += int(buckets[-1])
    return n_all


def test_every_request_is_counted_by_route_model_reason_and_code() -> None:
    metrics = Metrics()
    for record in (a_record(), a_record(), a_record(error="worker_died"), a_record("", code=404, route="/health")):
        metrics.observe(record)
    family = parsed(metrics.render([], 0))["localllm_requests"]
    total = {"route": CHAT, "model": "m", "finish_reason": "stop", "code": "200"}
    assert value(family, "_total", **total) == 2
    assert value(family, "_total", **{**total, "finish_reason": "error"}) == 1
    assert sum(s.value for s in family.samples) == 4


def test_latencies_are_those_of_the_record() -> None:
    metrics = Metrics()
    metrics.observe(a_record())
    families = parsed(metrics.render([], 0))
    assert value(families["localllm_time_to_first_token_seconds"], "_sum", model="m") == pytest.approx(0.2)
    assert value(families["localllm_time_to_first_token_seconds"], "_bucket", model="m", le="0.1") == 0
    assert value(families["localllm_time_to_first_token_seconds"], "_bucket", model="m", le="0.25") == 1
    assert value(families["localllm_inter_token_latency_seconds"], "_sum", model="m") == pytest.approx(0.03)
    e2e = families["localllm_e2e_request_latency_seconds"]
    assert value(e2e, "_sum", model="m", route=CHAT) == pytest.approx(0.5)
    assert value(families["localllm_queue_time_seconds"], "_sum", model="m") == pytest.approx(0.004)
    assert value(families["localllm_sample_seconds"], "_sum", model="m") == pytest.approx(0.0003)
    assert value(families["localllm_decode_seconds"], "_count", model="m") == 0


def test_requests_without_a_model_have_no_latencies() -> None:
    metrics = Metrics()
    metrics.observe(a_record("", code=400))
    assert check_histograms(parsed(metrics.render([], 0)).values()) == 0


def test_failed_and_cancelled_requests_do_not_count_as_latency_of_answers() -> None:
    metrics = Metrics()
    cancelled = a_record()
    cancelled.is_cancelled = True
    for record in (a_record(error="worker_died"), a_record(code=499), cancelled):
        metrics.observe(record)
    assert parsed(metrics.render([], 0))["localllm_e2e_request_latency_seconds"].samples == []


def test_every_name_of_the_reference_is_there() -> None:
    metrics = Metrics()
    metrics.observe(a_record())
    families = parsed(metrics.render([Reading("m", True, 100, {})], 1))
    assert {f"localllm_{name}" for name in NAMES} <= families.keys()
    assert all(family.documentation and family.type != "unknown" for family in families.values())


def test_what_workers_count_is_told_by_model() -> None:
    stats = {
        "n_running": 3,
        "n_waiting": 5,
        "n_prompt_tokens_computed": 70,
        "n_prompt_tokens_device": 30,
        "n_generated_tokens": 40,
        "n_accepted_draft_tokens": 2,
        "n_rejected_draft_tokens": 6,
        "n_preemptions": 1,
        "n_evictions": 9,
        "used_cells": 25,
        "rss_bytes": 1 << 30,
        "pool_use_at_first_refusal": None,
    }
    families = parsed(Metrics().render([Reading("m", True, 100, stats), Reading("idle", False)], 7))
    assert value(families["localllm_requests_running"], model="m") == 3
    assert value(families["localllm_requests_waiting"], model="m") == 5
    assert value(families["localllm_prompt_tokens"], "_total", model="m", source="computed") == 70
    assert value(families["localllm_prompt_tokens"], "_total", model="m", source="device") == 30
    assert value(families["localllm_prefix_cache_queries_tokens"], "_total", model="m") == 100
    assert value(families["localllm_prefix_cache_hits_tokens"], "_total", model="m") == 30
    assert value(families["localllm_spec_draft_tokens"], "_total", model="m", kind="all") == 8
    assert value(families["localllm_spec_accepted_tokens"], "_total", model="m", kind="all") == 2
    assert value(families["localllm_kv_cache_usage_ratio"], model="m") == 0.25
    assert families["localllm_kv_cache_usage_at_first_refusal_ratio"].samples == []
    assert value(families["localllm_memory_bytes"], kind="worker", model="m") == 1 << 30
    assert value(families["localllm_memory_bytes"], kind="server", model="") == 7
    assert value(families["localllm_model_loaded"], model="m") == 1
    assert value(families["localllm_model_loaded"], model="idle") == 0


def test_how_full_the_cache_was_at_the_first_refusal_is_told_once_there_was_one() -> None:
    families = parsed(Metrics().render([Reading("m", True, 100, {"pool_use_at_first_refusal": 0.875})], 7))
    assert value(families["localllm_kv_cache_usage_at_first_refusal_ratio"], model="m") == 0.875


def test_counters_named_here_exist_in_the_runtime() -> None:
    from localllm.server import metrics

    named = {part for _, _, _, samples in metrics._WORKER for _, parts in samples for part in parts}
    assert named <= set(RuntimeStats.__dataclass_fields__)


def test_a_worker_that_does_not_answer_is_told_and_has_no_counts() -> None:
    families = parsed(Metrics().render([Reading("m", True, 100, None)], 0))
    assert value(families["localllm_worker_answered"], model="m") == 0
    assert value(families["localllm_model_loaded"], model="m") == 1
    assert families["localllm_generation_tokens"].samples == []


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'x"} 1\nforged{y="', "ü 山", "{}", 'trailing\\"', "\\n"])
def test_label_values_are_escaped(name: str) -> None:
    metrics = Metrics()
    metrics.observe(a_record(name))
    families = parsed(metrics.render([Reading(name, True, 10, {"n_running": 1})], 0))
    assert value(families["localllm_requests_running"], model=name) == 1
    assert {s.labels["model"] for s in families["localllm_requests"].samples} == {name}
    assert all(family.startswith("localllm_") for family in families)


def test_help_is_escaped() -> None:
    page = histograms.document(histograms.head("x", "gauge", "one\ntwo \\ three"))
    assert parsed(page)["x"].documentation == "one\ntwo \\ three"


@pytest.mark.parametrize("bounds", [REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, PART_BOUNDS_S])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert all(a < b for a, b in itertools.pairwise(bounds))


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30))
def test_a_histogram_counts_every_number_in_the_first_bucket_that_holds_it(values: list[float]) -> None:
    histogram = Histogram(PART_BOUNDS_S)
    for number in values:
        histogram.observe(number)
    page = histograms.document(
        [*histograms.head("x_seconds", "histogram", "x"), *histograms.samples_of("x_seconds", {}, histogram)]
    )
    family = parsed(page)["x_seconds"]
    check_histograms([family])
    counted = [max(v, 0.0) for v in values if math.isfinite(v)]
    for bound in PART_BOUNDS_S:
        assert value(family, "_bucket", le=repr(bound).removesuffix(".0")) == sum(v <= bound for v in counted)
    assert value(family, "_count") == len(counted) == histogram.n


def test_scrapes_beside_observations_are_consistent_and_never_fall() -> None:
    metrics = Metrics()
    stop = threading.Event()

    def observe(model: str) -> None:
        while not stop.is_set():
            metrics.observe(a_record(model))

    threads = [threading.Thread(target=observe, args=(f"m{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        last = 0
        for _ in range(40):
            n_seen = check_histograms(parsed(metrics.render([], 0)).values())
            assert n_seen >= last
            last = n_seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    families = parsed(metrics.render([], 0))
    n_requests = sum(s.value for s in families["localllm_requests"].samples)
    ttft = families["localllm_time_to_first_token_seconds"]
    assert sum(s.value for s in ttft.samples if s.name.endswith("_count")) == n_requests


# --- over HTTP


def scrape(running: Running) -> dict[str, Metric]:
    reply = running.get("/metrics")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return parsed(reply.body.decode())


def test_the_page_tells_what_clients_saw_and_what_workers_count() -> None:
    supervisor = FakeSupervisor(FakeWorker("fake", fake_service()), stored=["other"])
    with serving(supervisor) as running:
        body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}
        for stream in (False, True):
            assert running.post("/v1/completions", {**body, "stream": stream}).status == 200
        running.post("/v1/embeddings", {"input": ["a", "b"]})
        running.post("/v1/completions", {"prompt": "a", "model": "UNKNOWN"})
        running.get("/no/such/route/SECRET")
        running.request("BREW", "/health")
        families = scrape(running)
        labels = {"route": "/v1/completions", "model": "fake", "finish_reason": "length", "code": "200"}
        assert value(families["localllm_requests"], "_total", **labels) == 2
        assert value(families["localllm_generation_tokens"], "_total", model="fake") == 12
        assert value(families["localllm_embedded_texts"], "_total", model="fake") == 2
        assert value(families["localllm_time_to_first_token_seconds"], "_count", model="fake") == 2
        assert value(families["localllm_inter_token_latency_seconds"], "_count", model="fake") == 10
        for phase in ("queue_time", "prefill", "decode", "tokenise", "sample", "ipc"):
            assert value(families[f"localllm_{phase}_seconds"], "_count", model="fake") >= 2
        assert value(families["localllm_model_loaded"], model="other") == 0
        assert value(families["localllm_worker_answered"], model="fake") == 1
        assert value(families["localllm_kv_cache_usage_ratio"], model="fake") <= 1
        assert value(families["localllm_memory_bytes"], kind="server", model="") > 1_000_000
        routes = {s.labels["route"] for s in families["localllm_requests"].samples}
        assert routes <= {"/v1/completions", "/v1/embeddings", "/health", "other"}
        page = running.get("/metrics").body.decode()
        assert not [text for text in ("UNKNOWN", "SECRET", "BREW", "conn:", "key:") if text in page]


def test_a_worker_that_hangs_does_not_hang_the_page() -> None:
    with serving() as running:
        running.worker.fails["stats"] = TimedOut("late")
        families = scrape(running)
        assert value(families["localllm_worker_answered"], model="fake") == 0
        assert families["localllm_generation_tokens"].samples == []


def test_scrapes_beside_work_are_consistent_and_counters_never_fall() -> None:
    with serving() as running:
        body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "stream": True}
        workers = [
            threading.Thread(target=lambda: [running.post("/v1/completions", body) for _ in range(10)])
            for _ in range(3)
        ]
        for thread in workers:
            thread.start()
        last: dict[str, float] = {}
        while any(thread.is_alive() for thread in workers):
            families = scrape(running)
            check_histograms(families.values())
            now = {
                f"{s.name}{sorted(s.labels.items())}": s.value
                for family in families.values()
                if family.type in ("counter", "histogram")
                for s in family.samples
            }
            assert all(now[name] >= before for name, before in last.items())
            last = now
        families = scrape(running)
        assert value(families["localllm_time_to_first_token_seconds"], "_count", model="fake") == 30
        assert value(families["localllm_generation_tokens"], "_total", model="fake") == 150
