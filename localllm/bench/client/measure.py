"""Sums up what became of a run's requests: latencies at their percentiles, throughput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from localllm.bench.client.calls import End, Outcome
from localllm.bench.stats import mean, stdev

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A measure over all requests, in milliseconds; `n` samples. Percentiles are interpolated."""

    n: int
    mean: float
    stdev: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. A distribution is None where nothing was measured.

    `ttft_ms`: from the time a request was due to its first piece of text (a thought counts);
    `answer_ttft_ms`: to the first that is no thought; `itl_ms`: between pieces; `tpot_ms`: a
    token after the first, by the server's count where it gives one; `e2e_ms`: to the end of an
    answer; `queue_ms`: as the server tells it. Only answers count, streams alone for all but
    `e2e_ms`. `n_by_end` names every end; `n_by_error` the codes behind refusals and error events.
    """

    duration_s: float
    n_requests: int
    n_by_end: Mapping[str, int]
    n_by_error: Mapping[str, int]
    faults: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None = None
    answer_ttft_ms: Distribution | None = None
    itl_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    e2e_ms: Distribution | None = None
    queue_ms: Distribution | None = None


def distribution(samples_ms: Sequence[float]) -> Distribution | None:
    """Return the distribution of `samples_ms`; None for none."""
    if not samples_ms:
        return None
    values = np.asarray(samples_ms, dtype=np.float64)
    p50, p90, p95, p99 = (float(x) for x in np.percentile(values, PERCENTILES))
    return Distribution(
        n=len(values),
        mean=mean(samples_ms),
        stdev=stdev(samples_ms),
        min=float(values.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
    )


def ttft_ms(outcome: Outcome) -> float | None:
    """Return the milliseconds from when a request was due to its first piece of text; None without one."""
    return 1e3 * (outcome.token_s[0] - outcome.due_s) if outcome.token_s else None


def e2e_ms(outcome: Outcome) -> float:
    """Return the milliseconds from when a request was due to its end."""
    return 1e3 * (outcome.ended_s - outcome.due_s)


def itl_ms(outcome: Outcome) -> list[float]:
    """Return the milliseconds between the pieces of text of a stream.

    Pieces that came at the same moment were one piece: a server may send several events at once.
    """
    moments = sorted(set(outcome.token_s))
    return [1e3 * (b - a) for a, b in pairwise(moments)]


def tpot_ms(outcome: Outcome) -> float | None:
    """Return the milliseconds a token after the first; None for answers of one token."""
    n_tokens = outcome.completion_tokens or len(outcome.token_s)
    if n_tokens < 2 or len(outcome.token_s) < 2:
        return None
    return 1e3 * (outcome.token_s[-1] - outcome.token_s[0]) / (n_tokens - 1)


@dataclass(slots=True)
class Tally:
    """Collects a run's figures request by request, so that a long run need not keep its outcomes.

    One owner. Memory: some bytes a token for `itl_ms`, less for the rest.
    """

    _n: int = 0
    _begin_s: float | None = None
    _end_s: float = 0.0
    _ends: Counter[str] = field(default_factory=Counter)
    _errors: Counter[str] = field(default_factory=Counter)
    _faults: Counter[str] = field(default_factory=Counter)
    _tokens: Counter[str] = field(default_factory=Counter)
    _samples: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ("ttft", "answer", "itl", "tpot", "e2e", "queue")}
    )

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._n += 1
        begin_s = outcome.due_s if self._begin_s is None else min(self._begin_s, outcome.due_s)
        self._begin_s, self._end_s = begin_s, max(self._end_s, outcome.ended_s)
        self._ends[outcome.end.value] += 1
        if outcome.end in (End.REFUSED, End.ERROR_EVENT):
            self._errors[outcome.error_code or f"status {outcome.status}"] += 1
        if outcome.fault:
            self._faults[outcome.fault] += 1
        self._tokens["prompt"] += outcome.prompt_tokens or 0
        self._tokens["cached"] += outcome.cached_tokens or 0
        self._tokens["completion"] += (
            len(outcome.token_s) if outcome.completion_tokens is None else outcome.completion_tokens
        )
        if outcome.end is End.ANSWER:
            self._sample(outcome)

    def _sample(self, outcome: Outcome) -> None:
        samples = self._samples
        samples["e2e"].append(e2e_ms(outcome))
        queue_ms = (outcome.timings or {}).get("queue_ms")
        if isinstance(queue_ms, (int, float)):
            samples["queue"].append(float(queue_ms))
        first_ms, pace_ms = ttft_ms(outcome), tpot_ms(outcome)
        if first_ms is not None:
            samples["ttft"].append(first_ms)
        if outcome.answer_s is not None:
            samples["answer"].append(1e3 * (outcome.answer_s - outcome.due_s))
        if pace_ms is not None:
            samples["tpot"].append(pace_ms)
        samples["itl"] += itl_ms(outcome)

    def summary(self) -> Summary:
        """Return what it came to so far. The duration is from the first request due to the last end."""
        duration_s = self._end_s - self._begin_s if self._begin_s is not None else 0.0
        samples, n_answers = self._samples, self._ends[End.ANSWER.value]
        return Summary(
            duration_s=duration_s,
            n_requests=self._n,
            n_by_end=dict(self._ends),
            n_by_error=dict(self._errors),
            faults=dict(self._faults),
            prompt_tokens=self._tokens["prompt"],
            completion_tokens=self._tokens["completion"],
            cached_tokens=self._tokens["cached"],
            output_tokens_per_s=self._tokens["completion"] / duration_s if duration_s else 0.0,
            requests_per_s=n_answers / duration_s if duration_s else 0.0,
            ttft_ms=distribution(samples["ttft"]),
            answer_ttft_ms=distribution(samples["answer"]),
            itl_ms=distribution(samples["itl"]),
            tpot_ms=distribution(samples["tpot"]),
            e2e_ms=distribution(samples["e2e"]),
            queue_ms=distribution(samples["queue"]),
        )


def summarise(outcomes: Iterable[Outcome]) -> Summary:
    """Return what these outcomes came to."""
    tally = Tally()
    for outcome in outcomes:
        tally.add(outcome)
    return tally.summary()
