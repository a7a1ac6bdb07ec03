"""The Mann-Whitney test against scipy on hundreds of samples, exact and approximate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from localllm.bench.stats.ranks import EXACT_UP_TO, mann_whitney


@pytest.fixture(scope="module")
def scipy_stats() -> Any:
    """scipy's statistics, a dependency of development alone."""
    return pytest.importorskip("scipy.stats")


def test_exact_p_is_scipys_without_ties(scipy_stats: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, m = (int(x) for x in rng.integers(1, EXACT_UP_TO + 1, size=2))
        a, b = rng.lognormal(size=n).tolist(), rng.lognormal(rng.uniform(-1, 1), size=m).tolist()
        found, other = mann_whitney(a, b), scipy_stats.mannwhitneyu(a, b, method="exact")
        assert found.is_exact
        assert found.u == other.statistic
        assert abs(found.p - other.pvalue) < 1e-9


def test_approximate_p_is_scipys_with_ties_and_for_many(scipy_stats: Any) -> None:
    rng = np.random.default_rng(1)
    for n_values in [2, 5, 30] * 100:
        n, m = (int(x) for x in rng.integers(2, 120, size=2))
        a = [0.0, 0.0, *rng.integers(0, n_values, size=n).astype(float).tolist()]
        b = [1.0, *rng.integers(0, n_values + 1, size=m).astype(float).tolist()]
        found, other = mann_whitney(a, b), scipy_stats.mannwhitneyu(a, b, method="asymptotic", use_continuity=True)
        assert not found.is_exact
        assert found.u == other.statistic
        assert abs(found.p - other.pvalue) < 1e-6
    a, b = rng.normal(size=26).tolist(), rng.normal(0.5, size=3).tolist()
    assert abs(mann_whitney(a, b).p - scipy_stats.mannwhitneyu(a, b, method="asymptotic").pvalue) < 1e-6


def test_five_against_five_in_full_order_is_two_in_252() -> None:
    found = mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    assert (found.u, found.is_exact) == (0, True)
    assert found.p == pytest.approx(2 / math.comb(10, 5))


def test_sides_may_be_exchanged() -> None:
    a, b = [1.0, 4.0, 9.0], [2.0, 3.0, 8.0, 11.0]
    assert mann_whitney(a, b).p == mann_whitney(b, a).p
    assert mann_whitney(a, b).u + mann_whitney(b, a).u == 12


def test_equal_values_show_nothing() -> None:
    assert mann_whitney([2.0] * 9, [2.0] * 9).p == 1.0
    assert mann_whitney([2.0], [2.0]).p == 1.0


def test_what_cannot_be_ranked_is_refused() -> None:
    for a, b in (([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match="no samples"):
            mann_whitney(a, b)
    with pytest.raises(ValueError, match="nan"):
        mann_whitney([1.0, math.nan], [1.0])
