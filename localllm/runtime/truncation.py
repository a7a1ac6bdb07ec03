"""Filters over one row of logits: which tokens stay in the draw.

Every filter keeps the front of one order, most probable first, lowest id first among equals, so
the result never depends on a sort's whims. Ids stay ascending; only survivors are sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.runtime.sampling_params import Sampling

Floats = NDArray[np.floating[Any]]

_BLOCK = 512
_STRIDE = 32


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The tokens still in the draw: `ids` ascending (None = the whole vocabulary) and their logits."""

    ids: NDArray[np.intp] | None
    logits: Floats

    def __len__(self) -> int:
        return len(self.logits)

    def keep(self, index: NDArray[np.intp]) -> Candidates:
        """Return the candidates at these ascending positions."""
        return Candidates(index if self.ids is None else self.ids[index], self.logits[index])

    def within(self, mask: NDArray[np.bool_]) -> Candidates:
        """Return the candidates that `mask`, bool [n_vocab], allows."""
        return self.keep(np.flatnonzero(mask if self.ids is None else mask[self.ids]))

    def token(self, index: int) -> int:
        """Return the id at a position."""
        return index if self.ids is None else int(self.ids[index])

    def weights(self, temperature: float = 1.0) -> Floats:
        """Return exp((logit - best) / temperature): the probabilities up to their sum."""
        scaled = self.logits - self.logits.max()
        if temperature != 1.0:
            scaled *= 1.0 / temperature
        return np.asarray(np.exp(scaled, out=scaled))

    def draw(self, uniform: float, temperature: float) -> int:
        """Return the token on which `uniform`, in [0, 1), falls."""
        if len(self) == 1:
            return self.token(0)
        return self.token(pick(self.weights(temperature), uniform))


def truncate(logits: Floats, sampling: Sampling, xtc_draw: float) -> Candidates:
    """Apply the filters of `sampling` in their order; greedy leaves the best token alone.

    `xtc_draw`, in [0, 1), decides whether XTC acts. At least one token is left.
    """
    if sampling.greedy:
        best = np.array([np.argmax(logits)], dtype=np.intp)
        return Candidates(best, logits[best])
    left = Candidates(None, logits)
    if sampling.top_n_sigma > 0:
        left = top_n_sigma(left, sampling.top_n_sigma)
    if 0 < sampling.top_k < len(left):
        left = left.keep(best_positions(left.logits, sampling.top_k))
    if sampling.typical_p < 1:
        left = typical(left, sampling.typical_p)
    if sampling.top_p < 1:
        left = top_p(left, sampling.top_p)
    if sampling.min_p > 0:
        left = min_p(left, sampling.min_p)
    if xtc_draw < sampling.xtc_probability:
        left = xtc(left, sampling.xtc_threshold)
    return left


def top_n_sigma(left: Candidates, n: float) -> Candidates:
    """Keep logits within `n` standard deviations of the best one.

    Source: Tang et al., Top-n-sigma, arXiv:2411.07641.
    """
    logits = left.logits
    best = logits.max()
    possible = logits if math.isfinite(logits.min()) else logits[np.isfinite(logits)]
    return left.keep(np.flatnonzero(logits >= best - n * possible.std()))


def best_positions(values: Floats, n_best: int) -> NDArray[np.intp]:
    """Return where the `n_best` largest values stand, ascending; among equals the first ones.

    Maxima of strided groups bound the n-th best from below, so that only few values are partitioned.
    """
    if n_best >= len(values):
        return np.arange(len(values))
    n_groups = len(values) // _STRIDE
    pool: NDArray[np.intp] | None = None
    if n_groups >= 2 * n_best:
        maxima = values[: n_groups * _STRIDE].reshape(_STRIDE, n_groups).max(axis=0)
        bound = np.partition(maxima, n_groups - n_best)[n_groups - n_best]
        pool = np.flatnonzero(values >= bound)
        values = values[pool]
    last = np.partition(values, len(values) - n_best)[len(values) - n_best]
    chosen = _front(values, last, n_best)
    return chosen if pool is None else pool[chosen]


def typical(left: Candidates, mass: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one, until they hold `mass`.

    Source: Meister et al., Locally Typical Sampling, arXiv:2202.00666.
    """
    weights = left.weights()
    probabilities = weights / float(weights.sum(dtype=np.float64))
    surprise = -np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    deviation = np.abs(surprise - float((probabilities * surprise).sum(dtype=np.float64)))  # no BLAS: its threads spin
    limit, near = 0.25, np.flatnonzero(deviation <= 0.25)
    while len(near) < len(left) and (not len(near) or probabilities[near].sum(dtype=np.float64) < mass):
        limit *= 1.5
        near = np.flatnonzero(deviation <= limit)
    order = near[np.argsort(deviation[near])]
    n_kept = int(np.searchsorted(np.cumsum(probabilities[order], dtype=np.float64), mass)) + 1
    if n_kept >= len(near):
        return left.keep(near)
    return left.keep(near[_front(-deviation[near], -deviation[order[n_kept - 1]], n_kept)])


def top_p(left: Candidates, mass: float) -> Candidates:
    """Keep the most probable tokens until they hold `mass`.

    Those below a floor together hold less than the rest of the mass, so they are never sorted.
    Source: Holtzman et al., nucleus sampling, arXiv:1904.09751.
    """
    weights = left.weights()
    total = float(weights.sum(dtype=np.float64))
    for floor in (2.0**-6, 2.0**-9, 2.0**-12, (1.0 - mass) * total / len(left), 0.0):
        pool = np.flatnonzero(weights >= floor)
        some = weights[pool]
        if some.sum(dtype=np.float64) >= mass * total:
            break
    descending = np.sort(some)[::-1]
    n_kept = int(np.searchsorted(np.cumsum(descending, dtype=np.float64), mass * total)) + 1
    if n_kept >= len(pool):
        return left.keep(pool)
    return left.keep(pool[_front(some, descending[n_kept - 1], n_kept)])


def min_p(left: Candidates, share: float) -> Candidates:
    """Keep tokens at least `share` times as probable as the best one.

    Source: Nguyen et al., min-p, arXiv:2407.01082.
    """
    return left.keep(np.flatnonzero(left.logits >= left.logits.max() + math.log(share)))


def xtc(left: Candidates, threshold: float) -> Candidates:
    """Of the tokens that hold at least `threshold`, drop all but the least probable.

    Source: p-e-w, "Exclude Top Choices", text-generation-webui #6335.
    """
    weights = left.weights()
    likely = np.flatnonzero((weights >= threshold * float(weights.sum(dtype=np.float64))) & (weights > 0))
    if len(likely) < 2:
        return left
    last = likely[len(likely) - 1 - int(np.argmin(weights[likely][::-1]))]
    stays = np.ones(len(left), dtype=np.bool_)
    stays[likely] = False
    stays[last] = True
    return left.keep(np.flatnonzero(stays))


def pick(weights: Floats, uniform: float) -> int:
    """Return the position on which `uniform`, in [0, 1), falls, each as wide as its weight.

    Long rows are summed by blocks, and only one block is accumulated.
    """
    start = 0
    if len(weights) > 2 * _BLOCK:
        n_whole = len(weights) // _BLOCK * _BLOCK
        sums = np.append(weights[:n_whole].reshape(-1, _BLOCK).sum(axis=1), weights[n_whole:].sum())
        ends = np.cumsum(sums, dtype=np.float64)
        block = _falls_on(ends, uniform * ends[-1])
        target = uniform * ends[-1] - (ends[block - 1] if block else 0.0)
        start = block * _BLOCK
        ends = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    else:
        ends = np.cumsum(weights, dtype=np.float64)
        target = uniform * ends[-1]
    return start + _falls_on(ends, target)


def _falls_on(ends: NDArray[np.float64], target: float) -> int:
    """Find the interval that holds `target`; rounding beyond the end falls on the last non-empty one."""
    index = int(np.searchsorted(ends, target, side="right"))
    return index if index < len(ends) else int(np.searchsorted(ends, ends[-1]))


def _front(values: Floats, last: Any, n: int) -> NDArray[np.intp]:
    """Return where the `n` largest values stand, ascending, when the n-th largest is `last`."""
    above = np.flatnonzero(values > last)
    equal = np.flatnonzero(values == last)[: n - len(above)]
    return np.sort(np.concatenate((above, equal)))
