"""`/metrics`: what requests were seen to take, and what the workers count, in Prometheus' text form.

Labels hold routes as registered, registered model names, codes and reasons: nothing that a caller chose.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import LocalLLMError
from localllm.models.system import resident_bytes
from localllm.server import histograms, tier_metrics
from localllm.server.histograms import PART_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Histogram
from localllm.server.record import RequestRecord

if TYPE_CHECKING:
    from localllm.server.state import ServerState
    from localllm.worker.supervisor import Worker

PATH: Final = "/metrics"
ANSWER_S: Final = 1.0
"""How long a worker may take to tell its counters; then the page goes out without them."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PHASES: Final = {
    "queue": ("localllm_queue_time_seconds", REQUEST_BOUNDS_S, "Time that requests waited for admission."),
    "prefill": ("localllm_prefill_seconds", REQUEST_BOUNDS_S, "Time from admission to the first token."),
    "decode": ("localllm_decode_seconds", REQUEST_BOUNDS_S, "Time from the first token to the last."),
    "template": ("localllm_template_seconds", PART_BOUNDS_S, "Time in the chat template of requests."),
    "tokenise": ("localllm_tokenise_seconds", PART_BOUNDS_S, "Time in tokenising prompts of requests."),
    "match": ("localllm_match_seconds", PART_BOUNDS_S, "Time in looking for known prefixes of requests."),
    "restore": ("localllm_restore_seconds", PART_BOUNDS_S, "Time in putting known prefixes back for requests."),
    "sample": ("localllm_sample_seconds", PART_BOUNDS_S, "Time in sampling, summed over the tokens of a request."),
    "ipc": ("localllm_ipc_seconds", PART_BOUNDS_S, "Time of a request's events between the processes, summed."),
}

_TTFT: Final = "localllm_time_to_first_token_seconds"
_ITL: Final = "localllm_inter_token_latency_seconds"
_E2E: Final = "localllm_e2e_request_latency_seconds"

# family, kind, what it tells, and per sample: further labels and the names of the counters that it adds up.
_Samples = tuple[tuple[Mapping[str, str], tuple[str, ...]], ...]
_CACHED: Final = ("n_prompt_tokens_device", "n_prompt_tokens_ram", "n_prompt_tokens_disk")
_WORKER: Final[tuple[tuple[str, histograms.Kind, str, _Samples], ...]] = (
    ("localllm_requests_running", "gauge", "Sequences at work.", (({}, ("n_running",)),)),
    ("localllm_requests_waiting", "gauge", "Sequences waiting for admission.", (({}, ("n_waiting",)),)),
    (
        "localllm_prompt_tokens_total",
        "counter",
        "Prompt tokens since the worker started, by where their KV came from.",
        (
            ({"source": "computed"}, ("n_prompt_tokens_computed",)),
            ({"source": "device"}, ("n_prompt_tokens_device",)),
            ({"source": "ram"}, ("n_prompt_tokens_ram",)),
            ({"source": "disk"}, ("n_prompt_tokens_disk",)),
        ),
    ),
    (
        "localllm_generation_tokens_total",
        "counter",
        "Tokens generated since the worker started, those of cancelled requests too.",
        (({}, ("n_generated_tokens",)),),
    ),
    (
        "localllm_embedded_texts_total",
        "counter",
        "Texts embedded since the worker started.",
        (({}, ("n_embedded_texts",)),),
    ),
    (
        "localllm_embedded_tokens_total",
        "counter",
        "Tokens of texts embedded since the worker started.",
        (({}, ("n_embedded_tokens",)),),
    ),
    (
        "localllm_prefix_cache_queries_tokens_total",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        (({}, ("n_prompt_tokens_computed", *_CACHED)),),
    ),
    (
        "localllm_prefix_cache_hits_tokens_total",
        "counter",
        "Prompt tokens that the prefix cache held.",
        (({}, _CACHED),),
    ),
    (
        "localllm_spec_draft_tokens_total",
        "counter",
        "Drafted tokens that were verified.",
        (({"kind": "all"}, ("n_accepted_draft_tokens", "n_rejected_draft_tokens")),),
    ),
    (
        "localllm_spec_accepted_tokens_total",
        "counter",
        "Drafted tokens that were accepted.",
        (({"kind": "all"}, ("n_accepted_draft_tokens",)),),
    ),
    ("localllm_engine_steps_total", "counter", "Forwards of the engine.", (({}, ("n_steps",)),)),
    ("localllm_engine_rows_total", "counter", "Rows in the engine's forwards.", (({}, ("n_rows",)),)),
    ("localllm_preemptions_total", "counter", "Sequences put back for lack of room.", (({}, ("n_preemptions",)),)),
    (
        "localllm_recomputed_tokens_total",
        "counter",
        "Tokens computed again after a preemption.",
        (({}, ("n_recomputed_tokens",)),),
    ),
    ("localllm_evictions_total", "counter", "Retained prefixes given up for room.", (({}, ("n_evictions",)),)),
    (
        "localllm_floor_chunks_total",
        "counter",
        "Prefill chunks at their floor although the latency target asked for less.",
        (({}, ("n_floor_chunks",)),),
    ),
    ("localllm_retained_slots", "gauge", "Finished sequences whose KV is kept.", (({}, ("n_retained_slots",)),)),
    ("localllm_kv_cells_used", "gauge", "Cells of the KV cache in use.", (({}, ("used_cells",)),)),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One registered model at the time of a scrape; `stats` is None where no worker answered."""

    model: str
    is_loaded: bool
    pool_tokens: int = 0
    stats: Mapping[str, Any] | None = None


@dataclass(slots=True)
class _Seen:
    """What requests of one model took."""

    ttft: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))
    itl: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    phases: dict[str, Histogram] = field(default_factory=lambda: {p: Histogram(b) for p, (_, b, _) in _PHASES.items()})
    by_route: dict[str, Histogram] = field(default_factory=dict)


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the route."""

    async def scrape(request: Request) -> Response:
        workers = state.supervisor.workers()
        told = await asyncio.gather(*map(_stats, workers))
        by_name = {worker.name: (worker, stats) for worker, stats in zip(workers, told, strict=True)}
        readings = []
        for entry in state.supervisor.entries():
            worker, stats = by_name.get(entry.name, (None, None))
            n_pool = int(worker.model.get("n_ctx", 0)) if worker is not None else 0
            readings.append(Reading(entry.name, worker is not None, n_pool, stats))
        return Response(state.metrics.render(readings, resident_bytes()), media_type=CONTENT_TYPE)

    return [Route(PATH, scrape, methods=["GET"])]


async def _stats(worker: Worker) -> Mapping[str, Any] | None:
    """Return a worker's counters; None where it does not tell them in time."""
    try:
        stats: Mapping[str, Any] = await worker.call("stats", timeout_s=ANSWER_S)
    except LocalLLMError:
        return None
    return stats


class Metrics:
    """Counts requests that ended, and renders them beside the readings of the workers. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str, str, str], int] = {}
        self._seen: dict[str, _Seen] = {}

    def observe(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        key = (record.route, record.model, record.finish_reason, str(record.code))
        with self._lock:
            self._requests[key] = self._requests.get(key, 0) + 1
            if record.model:
                _observe(self._seen.setdefault(record.model, _Seen()), record)

    def render(self, readings: Sequence[Reading], server_bytes: int) -> str:
        """Return the page. `server_bytes`: resident memory of this process."""
        with self._lock:
            seen = [*self._request_lines(), *self._latency_lines()]
        return histograms.document([*seen, *_model_lines(readings), *_memory_lines(readings, server_bytes)])

    def _request_lines(self) -> Iterator[str]:
        name = "localllm_requests_total"
        yield from histograms.head(name, "counter", "Requests that ended; code 499: the client had gone.")
        for (route, model, reason, code), n in sorted(self._requests.items()):
            labels = {"route": route, "model": model, "finish_reason": reason, "code": code}
            yield histograms.sample(name, labels, n)

    def _latency_lines(self) -> Iterator[str]:
        models = sorted(self._seen.items())
        yield from histograms.head(_TTFT, "histogram", "Time from a request's arrival to its first token.")
        for model, seen in models:
            yield from histograms.samples_of(_TTFT, {"model": model}, seen.ttft)
        yield from histograms.head(_ITL, "histogram", "Time between two tokens of an answer.")
        for model, seen in models:
            yield from histograms.samples_of(_ITL, {"model": model}, seen.itl)
        yield from histograms.head(_E2E, "histogram", "Time from a request's arrival to its end; failed ones left out.")
        for model, seen in models:
            for route, histogram in sorted(seen.by_route.items()):
                yield from histograms.samples_of(_E2E, {"model": model, "route": route}, histogram)
        for phase, (name, _, told) in _PHASES.items():
            yield from histograms.head(name, "histogram", told)
            for model, seen in models:
                yield from histograms.samples_of(name, {"model": model}, seen.phases[phase])


def _observe(seen: _Seen, record: RequestRecord) -> None:
    if record.ttft_s is not None:
        seen.ttft.observe(record.ttft_s)
    seen.itl.add(record.itl)
    for phase, elapsed_s in record.phases_s.items():
        if phase in seen.phases:
            seen.phases[phase].observe(elapsed_s)
    if record.code < 400 and not record.error and not record.is_cancelled:
        if record.route not in seen.by_route:
            seen.by_route[record.route] = Histogram(REQUEST_BOUNDS_S)
        seen.by_route[record.route].observe(record.total_s)


def _model_lines(readings: Sequence[Reading]) -> Iterator[str]:
    """Yield what the workers count. A worker that does not answer has no samples, but is still told of."""
    yield from histograms.head("localllm_model_loaded", "gauge", "1 where a worker holds the model.")
    for reading in readings:
        yield histograms.sample("localllm_model_loaded", {"model": reading.model}, int(reading.is_loaded))
    yield from histograms.head("localllm_worker_answered", "gauge", "1 where the model's worker answered this scrape.")
    for reading in readings:
        if reading.is_loaded:
            answered = int(reading.stats is not None)
            yield histograms.sample("localllm_worker_answered", {"model": reading.model}, answered)
    told = [(reading, reading.stats) for reading in readings if reading.stats is not None]
    for name, kind, text, samples in _WORKER:
        yield from histograms.head(name, kind, text)
        for reading, stats in told:
            for labels, parts in samples:
                value = sum(_count(stats, part) for part in parts)
                yield histograms.sample(name, {"model": reading.model, **labels}, value)
    yield from tier_metrics.lines([(reading.model, stats) for reading, stats in told])
    name = "localllm_kv_cache_usage_ratio"
    yield from histograms.head(name, "gauge", "Share of the KV cache's cells in use.")
    for reading, stats in told:
        if reading.pool_tokens > 0:
            yield histograms.sample(name, {"model": reading.model}, _count(stats, "used_cells") / reading.pool_tokens)
    name = "localllm_kv_cache_usage_at_first_refusal_ratio"
    yield from histograms.head(name, "gauge", "Share of the KV cache's cells in use when room was first short.")
    for reading, stats in told:
        if isinstance(share := stats.get("pool_use_at_first_refusal"), float):
            yield histograms.sample(name, {"model": reading.model}, share)


def _memory_lines(readings: Sequence[Reading], server_bytes: int) -> Iterator[str]:
    name = "localllm_memory_bytes"
    yield from histograms.head(name, "gauge", "Resident memory: of this process, and of each worker.")
    yield histograms.sample(name, {"kind": "server", "model": ""}, server_bytes)
    for reading in readings:
        if reading.stats is not None:
            labels = {"kind": "worker", "model": reading.model}
            yield histograms.sample(name, labels, _count(reading.stats, "rss_bytes"))


def _count(stats: Mapping[str, Any], name: str) -> float:
    value = stats.get(name, 0)
    return value if isinstance(value, (int, float)) else 0
