"""The latencies of one request, and their distribution over many: all in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from localllm.bench.client.calls import Outcome
from localllm.bench.stats.summaries import mean, stdev

PERCENTILES = (50, 90, 95, 99)
_MAX_QUEUE_MS = 1e9
"""Twelve days: what a server tells beyond that, or below 0, is no time that a request waited."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A measure over all requests, in milliseconds; `n` samples. Percentiles are interpolated linearly.

    `stdev` is the sample's (n - 1 below the line; 0 for one).
    """

    n: int
    mean: float
    stdev: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    def at(self, statistic: str) -> float:
        """Return one of measures.STATISTICS. Raises KeyError for any other name."""
        return {
            "min": self.min,
            "mean": self.mean,
            "p50": self.p50,
            "p90": self.p90,
            "p95": self.p95,
            "p99": self.p99,
            "max": self.max,
        }[statistic]


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
    """Return the milliseconds from when a request was due to its first piece, a thought or not; None without one."""
    return 1e3 * (outcome.token_s[0] - outcome.due_s) if outcome.token_s else None


def answer_ttft_ms(outcome: Outcome) -> float | None:
    """Return the milliseconds from when a request was due to the first piece that is no thought; None without one."""
    return None if outcome.answer_s is None else 1e3 * (outcome.answer_s - outcome.due_s)


def e2e_ms(outcome: Outcome) -> float:
    """Return the milliseconds from when a request was due to its end."""
    return 1e3 * (outcome.ended_s - outcome.due_s)


def queue_ms(outcome: Outcome) -> float | None:
    """Return the milliseconds in the server's queue, as its `timings` tell; None where they do not."""
    told = (outcome.timings or {}).get("queue_ms")
    if isinstance(told, bool) or not isinstance(told, (int, float)) or not 0 <= told <= _MAX_QUEUE_MS:
        return None
    return float(told)


def itl_ms(outcome: Outcome) -> list[float]:
    """Return the milliseconds between the pieces of text of a stream.

    Pieces that came at the same moment were one piece: a server may send several events at once.
    """
    moments = sorted(set(outcome.token_s))
    return [1e3 * (b - a) for a, b in pairwise(moments)]


def tpot_ms(outcome: Outcome, output_tokens: int | None = None) -> float | None:
    """Return the milliseconds a token after the first: (last piece - first piece) / (tokens - 1).

    None for answers of one token or one piece. `output_tokens`: by default the server's count,
    else one a piece.
    """
    n_tokens = output_tokens or outcome.completion_tokens or len(outcome.token_s)
    if n_tokens < 2 or len(outcome.token_s) < 2:
        return None
    return 1e3 * (outcome.token_s[-1] - outcome.token_s[0]) / (n_tokens - 1)


def latencies_ms(outcome: Outcome, output_tokens: int | None = None) -> Mapping[str, Sequence[float]]:
    """Return what one request has of each of measures.LATENCIES: one value, none, or of "itl" any number."""
    single = {
        "ttft": ttft_ms(outcome),
        "answer_ttft": answer_ttft_ms(outcome),
        "tpot": tpot_ms(outcome, output_tokens),
        "e2e": e2e_ms(outcome),
        "queue": queue_ms(outcome),
    }
    return {"itl": itl_ms(outcome)} | {name: [] if value is None else [value] for name, value in single.items()}
