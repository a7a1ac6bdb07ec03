"""Summaries of repeated measurements: medians, percentiles, differences and ratios with a bootstrap interval.

All take plain sequences of floats. Intervals are percentile bootstraps with a fixed seed, so
the same samples always give the same interval. Each sample is drawn by itself: where samples that
follow one another are alike, the interval is too narrow (`blocks.py` draws blocks of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Statistic: TypeAlias = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Takes samples [n_resamples, n], gives the statistic of each row [n_resamples]."""

N_RESAMPLES = 4_000
LEVEL = 0.95
_MAX_DRAWN = 1 << 22  # values held at once while resampling: 32 MiB


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and the bounds of its interval, from `n` samples."""

    median: float
    low: float
    high: float
    n: int


def mean(samples: Sequence[float]) -> float:
    """Return the arithmetic mean; nan for none."""
    return math.fsum(samples) / len(samples) if samples else math.nan


def stdev(samples: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1 below the line); 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    middle = mean(samples)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in samples) / (len(samples) - 1))


def median(samples: Sequence[float]) -> float:
    """Return the median; nan for none."""
    return float(np.median(np.asarray(samples, dtype=np.float64))) if samples else math.nan


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the `percent`-th percentile, between neighbours interpolated as numpy's "linear"; nan for none."""
    return float(np.percentile(np.asarray(samples, dtype=np.float64), percent)) if len(samples) else math.nan


def percentile_of(percent: float) -> Statistic:
    """Return `percentile` as a statistic of rows."""

    def found(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        percentiles: NDArray[np.float64] = np.percentile(rows, percent, axis=1)
        return percentiles

    return found


def bootstrap_medians(samples: Sequence[float], *, seed: int = 0) -> NDArray[np.float64]:
    """Return the medians of N_RESAMPLES draws with replacement: float64 [N_RESAMPLES]."""
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(N_RESAMPLES, len(values)))
    medians: NDArray[np.float64] = np.median(values[picks], axis=1)
    return medians


def estimate(samples: Sequence[float], *, level: float = LEVEL, seed: int = 0) -> Estimate:
    """Return the median of `samples` with its percentile-bootstrap interval.

    Raises: ValueError without samples. One sample is its own interval.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    if not samples:
        raise ValueError("no samples")
    tail = (1 - level) / 2
    low, high = np.quantile(bootstrap_medians(samples, seed=seed), (tail, 1 - tail))
    return Estimate(median(samples), float(low), float(high), len(samples))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, level: float = LEVEL, seed: int = 0) -> Estimate:
    """Return the median of `ours[i] / theirs[i]` with its interval.

    The two were measured in turn, so a drift of the machine's speed falls on both of a pair.
    Raises: ValueError where the lengths differ, or a value is not above zero.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples against {len(theirs)}")
    if any(x <= 0 for x in (*ours, *theirs)):
        raise ValueError("a ratio needs samples above zero")
    return estimate([a / b for a, b in zip(ours, theirs, strict=True)], level=level, seed=seed)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the bounds that its resamples keep to."""

    value: float
    low: float
    high: float


def difference(
    a: Sequence[float],
    b: Sequence[float],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return `statistic` of `b` less that of `a`, unpaired, with its percentile-bootstrap interval.

    Raises: ValueError without samples.
    """
    return _interval(np.subtract, a, b, statistic, (level, n_resamples, seed))


def ratio(
    a: Sequence[float],
    b: Sequence[float],
    statistic: Statistic,
    *,
    level: float = LEVEL,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Return `statistic` of `b` over that of `a`, unpaired, with its percentile-bootstrap interval.

    Raises: ValueError without samples, or where a value of `a` is not above zero.
    """
    if any(x <= 0 for x in a):
        raise ValueError("a ratio needs samples above zero")
    return _interval(np.divide, a, b, statistic, (level, n_resamples, seed))


def _interval(
    combined: Callable[..., NDArray[np.float64]],
    a: Sequence[float],
    b: Sequence[float],
    statistic: Statistic,
    settings: tuple[float, int, int],
) -> Interval:
    if not len(a) or not len(b):
        raise ValueError("no samples")
    level, n_resamples, seed = settings
    of_a, of_b = (np.asarray(samples, dtype=np.float64) for samples in (a, b))
    rng = np.random.default_rng(seed)
    drawn = combined(_resampled(of_b, statistic, n_resamples, rng), _resampled(of_a, statistic, n_resamples, rng))
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    value = combined(statistic(of_b[np.newaxis]), statistic(of_a[np.newaxis]))[0]
    return Interval(float(value), float(low), float(high))


def _resampled(
    samples: NDArray[np.float64], statistic: Statistic, n_resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return `statistic` of draws with replacement: float64 [n_resamples]. Holds _MAX_DRAWN values, or one draw."""
    n_at_once = max(1, min(n_resamples, _MAX_DRAWN // len(samples)))
    found = []
    for start in range(0, n_resamples, n_at_once):
        n_rows = min(n_at_once, n_resamples - start)
        found.append(statistic(samples[rng.integers(0, len(samples), size=(n_rows, len(samples)))]))
    return np.concatenate(found)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return each p as it counts among the others: of those at or below 0.05, at most one in twenty is chance.

    Where nothing differs at all, the chance of any at or below 0.05 is 5 %.
    Source: Benjamini and Hochberg 1995.
    """
    found, least = [1.0] * len(p_values), 1.0
    order = sorted(range(len(p_values)), key=lambda index: p_values[index], reverse=True)
    for n_not_above, index in zip(range(len(p_values), 0, -1), order, strict=True):
        least = min(least, p_values[index] * len(p_values) / n_not_above)
        found[index] = least
    return found
