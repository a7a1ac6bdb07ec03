"""Summaries of repeated measurements: means, percentiles, medians and ratios with a bootstrap interval.

All take plain sequences of floats. Intervals are percentile bootstraps with a fixed seed, so
the same samples always give the same interval. Each sample is drawn by itself: where samples that
follow one another are alike, the interval is too narrow (`blocks.py` draws blocks of them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 4_000
LEVEL = 0.95
_SEED = 0


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


def bootstrap_medians(samples: Sequence[float]) -> NDArray[np.float64]:
    """Return the medians of N_RESAMPLES draws with replacement: float64 [N_RESAMPLES]."""
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(_SEED).integers(0, len(values), size=(N_RESAMPLES, len(values)))
    medians: NDArray[np.float64] = np.median(values[picks], axis=1)
    return medians


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median of `samples` with its percentile-bootstrap interval.

    Raises: ValueError without samples. One sample is its own interval.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
    """
    if not samples:
        raise ValueError("no samples")
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(bootstrap_medians(samples), (tail, 1 - tail))
    return Estimate(median(samples), float(low), float(high), len(samples))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return the median of `ours[i] / theirs[i]` with its interval.

    The two were measured in turn, so a drift of the machine's speed falls on both of a pair.
    Raises: ValueError where the lengths differ, or a value is not above zero.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples against {len(theirs)}")
    if any(x <= 0 for x in (*ours, *theirs)):
        raise ValueError("a ratio needs samples above zero")
    return estimate([a / b for a, b in zip(ours, theirs, strict=True)])


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
