"""How far a statistic of requests that are not independent may be off: whole blocks of them are drawn anew.

Requests that follow one another are alike (the machine drifts, a batch is shared), so drawing single
requests claims more than was seen. What is drawn here is a block: a round where there are rounds,
else a stretch of consecutive requests, long against the time over which they are alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.bench.stats.ranks import ranked

Values: TypeAlias = NDArray[np.float64]
Block: TypeAlias = Values
"""Values that are drawn together."""

N_RESAMPLES = 1_000
MOST_BLOCKS = 10
FEWEST_BLOCKS = 4
_LENGTHS_A_BLOCK = 4.0  # of the time over which requests are alike
_FEWEST_TO_SEE_LIKENESS = 12
_MAX_DISTINCT = 512
_MAX_HELD = 1 << 22


def n_blocks(of_requests: Sequence[Sequence[float]]) -> int:
    """Return into how many blocks requests can be cut: at most MOST_BLOCKS, fewer where neighbours are alike."""
    n = len(of_requests)
    alike = likeness([middle(values) for values in of_requests if values])
    most = MOST_BLOCKS if alike == 1 else int(n / (_LENGTHS_A_BLOCK * alike))
    return min(n, max(FEWEST_BLOCKS, min(MOST_BLOCKS, most)))


def middle(values: Sequence[float]) -> float:
    """Return the median of a request's values, most often one alone."""
    return values[0] if len(values) == 1 else statistics.median(values)


def likeness(series: Sequence[float]) -> float:
    """Return over how many neighbours values are alike: 1 for independent ones, or for too few to tell.

    It is the sum of the autocorrelations of their ranks on both sides, up to the first that could be chance.
    """
    n = len(series)
    if n < _FEWEST_TO_SEE_LIKENESS:
        return 1.0
    ranks, _ = ranked(np.asarray(series, dtype=np.float64))
    ranks = ranks - ranks.mean()
    spread = float(ranks @ ranks)
    if spread == 0:
        return 1.0
    found = 1.0
    for lag in range(1, n // 3):
        # 1 / n: an estimate from a short series is low by about that.
        correlation = float(ranks[:-lag] @ ranks[lag:]) / spread + 1 / n
        if correlation < 1.3 / math.sqrt(n):
            break
        found += 2 * correlation
    return found


def cut(of_requests: Sequence[Sequence[float]], n: int) -> list[Block]:
    """Return `n` blocks of consecutive requests, as equal in number as can be."""
    edges = [round(k * len(of_requests) / n) for k in range(n + 1)]
    return [_joined(of_requests[a:b]) for a, b in pairwise(edges)]


def whole(of_requests: Sequence[Sequence[float]]) -> Block:
    """Return all requests as one block: a round."""
    return _joined(of_requests)


def draws(n: int, seed: int) -> Values:
    """Return how often each of `n` blocks is drawn, with replacement: whole numbers, float64 [N_RESAMPLES, n]."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES).astype(np.float64)


def resampled(blocks: Sequence[Block], percent: float | None, drawn: Values) -> Values:
    """Return the percentile (None: the mean) of what each draw holds: float64 [N_RESAMPLES], nan for nothing."""
    return _means(blocks, drawn) if percent is None else _percentiles(blocks, percent, drawn)


def _joined(of_requests: Sequence[Sequence[float]]) -> Values:
    return np.asarray([value for values in of_requests for value in values], dtype=np.float64)


def _means(blocks: Sequence[Block], drawn: Values) -> Values:
    sums = np.asarray([float(block.sum()) for block in blocks])
    counts = np.asarray([len(block) for block in blocks], dtype=np.float64)
    n = drawn @ counts
    means: Values = np.divide(drawn @ sums, n, out=np.full(len(drawn), np.nan), where=n > 0)
    return means


def _percentiles(blocks: Sequence[Block], percent: float, drawn: Values) -> Values:
    """Count how often each distinct value is drawn, instead of sorting each draw."""
    distinct = _distinct(np.concatenate(list(blocks)))
    counts = np.zeros((len(blocks), len(distinct)))
    for row, block in zip(counts, blocks, strict=True):
        np.add.at(row, _nearest(distinct, block), 1.0)
    n_at_once = max(1, _MAX_HELD // len(distinct))
    parts = [drawn[start : start + n_at_once] for start in range(0, len(drawn), n_at_once)]
    return np.concatenate([_weighted(distinct, part @ counts, percent) for part in parts])


def _weighted(distinct: Values, weights: Values, percent: float) -> Values:
    """Return the percentile of `distinct`, each as often as its weight says: numpy's "linear", a row a draw."""
    up_to = np.cumsum(weights, axis=1)
    n = up_to[:, -1].copy()
    # One search serves all rows: each is lifted above the one before it.
    lift = np.arange(len(weights)) * (n.max() + 1)
    up_to += lift[:, np.newaxis]
    firsts = np.arange(len(weights)) * len(distinct)

    def at(place: Values) -> Values:
        index = np.searchsorted(up_to.ravel(), place + lift, side="right") - firsts
        found: Values = distinct[np.minimum(index, len(distinct) - 1)]
        return found

    place = np.maximum(n - 1, 0) * (percent / 100)
    below = np.floor(place)
    low, high = at(below), at(np.minimum(below + 1, np.maximum(n - 1, 0)))
    between: Values = np.where(n > 0, low + (high - low) * (place - below), np.nan)
    return between


def _distinct(values: Values) -> Values:
    """Return the distinct values in order; of very many, ones spread evenly over their ranks."""
    distinct = np.unique(values)
    if len(distinct) <= _MAX_DISTINCT:
        return distinct
    picked: Values = np.unique(np.quantile(values, np.linspace(0, 1, _MAX_DISTINCT), method="nearest"))
    return picked


def _nearest(distinct: Values, values: Values) -> NDArray[np.int64]:
    """Return the index in `distinct` that is nearest to each value."""
    right = np.clip(np.searchsorted(distinct, values), 1, max(1, len(distinct) - 1))
    if len(distinct) == 1:
        return np.zeros(len(values), dtype=np.int64)
    is_left = values - distinct[right - 1] < distinct[right] - values
    index: NDArray[np.int64] = np.where(is_left, right - 1, right).astype(np.int64)
    return index
