"""Chooses the loads of a sweep, one after the other, and finds the knee: the most that is still served well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from localllm.bench.client.calls import End
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.spec import Load
from localllm.bench.serving.summary import summarise_run
from localllm.bench.slo import Slo

MAX_CLIENTS = 64
LEAST_GAIN = 0.05
KEPT_SHARE = 0.95
PROBE_CLIENTS = 8
"""Of the closed loop that finds out what a server can do, before rates are tried."""
RATE_SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
RATE_FACTOR = 1.25
MAX_RATE_SHARE = 4.0
"""A server may do more with more than eight requests at once: as long as it keeps up, more is tried, up to so much."""


class Sweep(Enum):
    """Which loads are tried."""

    CLIENTS = "clients"
    RATES = "rates"


@dataclass(frozen=True, slots=True)
class Point:
    """What one load came to.

    `offered_per_s`, `achieved_per_s`: the pace of arrivals (0 in a closed loop, which has none) and of answers.
    `error_share`: of requests without an answer. `meets_slo`: None where nothing is asked for.
    """

    load: Load
    output_tokens_per_s: float
    offered_per_s: float
    achieved_per_s: float
    error_share: float = 0.0
    meets_slo: bool | None = None

    @property
    def keeps_up(self) -> bool:
        """Whether as much is answered as comes."""
        return self.achieved_per_s >= KEPT_SHARE * self.offered_per_s


@dataclass(frozen=True, slots=True)
class Knee:
    """The load up to which more load is answered well, and what its run gave. `why`: the rule, in words."""

    load: Load
    cache: str
    output_tokens_per_s: float
    requests_per_s: float
    why: str


def next_load(sweep: Sweep, points: Sequence[Point], shape: float = 1.0) -> Load | None:
    """Return the load to try after these; None when the sweep is done. Pure.

    Clients: 1, 2, 4, ... until throughput gains less than 5 %, errors appear, or 64 are reached. Rates: 8 clients
    find the capacity, then shares of that; a server that keeps up with the last of them is given more.
    """
    if sweep is Sweep.RATES:
        return _next_rate(points, shape)
    if not points:
        return Load(concurrency=1)
    last = points[-1]
    n_clients = last.load.concurrency or 1
    if last.error_share > 0 or n_clients >= MAX_CLIENTS:
        return None
    if len(points) > 1 and last.output_tokens_per_s < (1 + LEAST_GAIN) * points[-2].output_tokens_per_s:
        return None
    return Load(concurrency=2 * n_clients)


def _next_rate(points: Sequence[Point], shape: float) -> Load | None:
    if not points:
        return Load(concurrency=PROBE_CLIENTS)
    capacity_per_s, tried = points[0].achieved_per_s, points[1:]
    if capacity_per_s <= 0:
        return None
    if len(tried) < len(RATE_SHARES):
        return Load(rate_per_s=_rounded(capacity_per_s * RATE_SHARES[len(tried)]), shape=shape)
    rate_per_s = RATE_FACTOR * (tried[-1].load.rate_per_s or 0.0)
    goes_on = tried[-1].keeps_up and rate_per_s <= MAX_RATE_SHARE * capacity_per_s
    return Load(rate_per_s=_rounded(rate_per_s), shape=shape) if goes_on else None


def _rounded(rate_per_s: float) -> float:
    return float(f"{rate_per_s:.3g}")


def knee(results: Sequence[RunResult], slo: Slo | None) -> Knee | None:
    """Return the knee of runs at several loads of one kind; None where there is none to tell."""
    by_load = {result.spec.load: result for result in results if result.samples}
    found = knee_of([point(result, slo) for result in by_load.values()]) if len(by_load) > 1 else None
    if found is None:
        return None
    best, why = found
    result = by_load[best.load]
    requests_per_s = summarise_run(result).value("request_throughput") or 0.0
    return Knee(best.load, result.spec.cache.value, best.output_tokens_per_s, requests_per_s, why)


def knee_of(points: Sequence[Point]) -> tuple[Point, str] | None:
    """Return the best point and the rule that chose it; None where no point is good. Pure.

    Rates: the largest of which 95 % is answered in time. Clients: the fewest that give 95 % of the best throughput
    without errors. Both among those that meet the SLO, where there is one.
    """
    good = [one for one in points if one.meets_slo is not False]
    also = ", among those that meet the SLO" if any(one.meets_slo is not None for one in points) else ""
    rates = [one for one in good if one.load.rate_per_s is not None and one.keeps_up]
    if rates:
        best = max(rates, key=lambda one: one.load.rate_per_s or 0.0)
        most_per_s = max(one.load.rate_per_s or 0.0 for one in points)
        untried = "; more was not tried" if best.load.rate_per_s == most_per_s else ""
        return best, f"the largest rate of which {KEPT_SHARE:.0%} is answered in time{also}{untried}"
    clients = [one for one in good if one.load.concurrency is not None and one.error_share == 0]
    if not clients or any(one.load.rate_per_s is not None for one in points):
        return None
    enough_per_s = KEPT_SHARE * max(one.output_tokens_per_s for one in clients)
    best = min(
        (one for one in clients if one.output_tokens_per_s >= enough_per_s), key=lambda one: one.load.concurrency or 0
    )
    return best, f"the fewest clients that give {KEPT_SHARE:.0%} of the best throughput{also}"


def point(result: RunResult, slo: Slo | None) -> Point:
    """Return what a run came to at its load."""
    summary = summarise_run(result)
    samples = result.samples
    answers = [sample.outcome for sample in samples if sample.outcome.end is End.ANSWER]
    share = len(answers) / len(samples) if samples else 0.0
    is_open = result.spec.load.concurrency is None
    met = None if slo is None else all(bool(line["met"]) for line in slo.verdicts(summary.value))
    return Point(
        load=result.spec.load,
        output_tokens_per_s=summary.value("output_throughput") or 0.0,
        offered_per_s=pace_per_s([sample.outcome.due_s for sample in samples]) if is_open else 0.0,
        achieved_per_s=share * pace_per_s([one.ended_s for one in answers]),
        error_share=1.0 - share,
        meets_slo=met,
    )


def pace_per_s(moments_s: Sequence[float]) -> float:
    """Return how many a second these moments are, by the line that fits them best; 0 for fewer than two.

    The time between the last request and its answer does not count, as it would in n / duration: a short run at a
    rate that is served well would seem to fall behind.
    """
    n = len(moments_s)
    if n < 2:
        return 0.0
    in_order = sorted(moments_s)
    middle, mean_s = (n - 1) / 2, sum(in_order) / n
    spread = sum((i - middle) ** 2 for i in range(n))
    slope_s = sum((i - middle) * (moment - mean_s) for i, moment in enumerate(in_order)) / spread
    return 1 / slope_s if slope_s > 0 else 0.0
