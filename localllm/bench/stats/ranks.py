"""The Mann-Whitney U test: whether one of two groups of measurements tends to be larger than the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EXACT_UP_TO = 25
"""Samples a side up to which every order of the ranks is counted, where none are tied."""


@dataclass(frozen=True, slots=True)
class MannWhitney:
    """`u`: pairs in which the first group's value is the larger, ties half; `p`: two-sided.

    `is_exact`: p was counted over all orders; else it is the normal approximation.
    """

    u: float
    p: float
    is_exact: bool


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> MannWhitney:
    """Test whether values of `a` and `b` come from one distribution, by their ranks alone.

    Exact for up to EXACT_UP_TO samples a side without ties; else the normal approximation with
    corrections for ties and continuity. All values equal: p = 1. The samples of a side are taken to
    be independent. Raises: ValueError without samples, or for nan.
    Source: Mann and Whitney 1947; Lehmann, Nonparametrics, chapter 1.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if not len(first) or not len(second):
        raise ValueError("no samples")
    both = np.concatenate([first, second])
    if np.isnan(both).any():
        raise ValueError("a sample is nan")
    ranks, n_tied = ranked(both)
    u = float(ranks[: len(first)].sum()) - len(first) * (len(first) + 1) / 2
    if len(n_tied) == len(both) and max(len(first), len(second)) <= EXACT_UP_TO:
        return MannWhitney(u, _exact_p(u, len(first), len(second)), True)
    return MannWhitney(u, _normal_p(u, len(first), len(second), n_tied), False)


def ranked(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each value's rank from 1, the mean rank where tied, and how many share each distinct value."""
    _, place, n_tied = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(n_tied)
    return (last - (n_tied - 1) / 2)[place.reshape(-1)], n_tied.astype(np.int64)


def _exact_p(u: float, n: int, m: int) -> float:
    share = _shares_of_u(n, m)
    smaller = round(min(u, n * m - u))
    return min(1.0, 2 * float(share[: smaller + 1].sum()))


def _shares_of_u(n: int, m: int) -> NDArray[np.float64]:
    """Return the share of all orders that has each U: [n * m + 1].

    Whichever sample is the largest of all decides: one of `n` beats all of the other side, one of `m` none.
    """
    rows = [np.ones(1) for _ in range(m + 1)]  # rows[j]: shares for i samples against j
    for i in range(1, n + 1):
        rows[0] = np.ones(1)
        for j in range(1, m + 1):
            shares = np.zeros(i * j + 1)
            shares[j:] += rows[j] * (i / (i + j))
            shares[: i * (j - 1) + 1] += rows[j - 1] * (j / (i + j))
            rows[j] = shares
    return rows[m]


def _normal_p(u: float, n: int, m: int, n_tied: NDArray[np.int64]) -> float:
    total = n + m
    ties = float((n_tied.astype(np.float64) ** 3 - n_tied).sum())
    spread = math.sqrt(max(0.0, n * m / 12 * ((total + 1) - ties / (total * (total - 1)))))
    if spread == 0:
        return 1.0
    z = (max(u, n * m - u) - n * m / 2 - 0.5) / spread
    return min(1.0, math.erfc(z / math.sqrt(2)))
