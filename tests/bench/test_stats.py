"""Medians, spreads and intervals against scipy, and against cases that are known by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from localllm.bench import stats


def samples(n: int, seed: int = 3) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).lognormal(mean=1.0, sigma=0.3, size=n)]


@pytest.mark.parametrize("n", [2, 5, 6, 31])
def test_mean_median_and_spread_agree_with_scipy(n: int) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    data = samples(n)
    assert stats.mean(data) == pytest.approx(scipy_stats.tmean(data))
    assert stats.stdev(data) == pytest.approx(scipy_stats.tstd(data))
    assert stats.median(data) == pytest.approx(scipy_stats.scoreatpercentile(data, 50))


def scipy_bootstrap(data: list[float]) -> Any:
    return pytest.importorskip("scipy.stats").bootstrap(
        (data,), np.median, method="percentile", n_resamples=4000, rng=np.random.default_rng(1), vectorized=True
    )


def test_interval_agrees_with_scipy_bootstrap() -> None:
    data = samples(60)
    other, ours = scipy_bootstrap(data).confidence_interval, stats.estimate(data)
    width = other.high - other.low
    assert abs(ours.low - other.low) < 0.1 * width
    assert abs(ours.high - other.high) < 0.1 * width
    assert ours.low <= ours.median <= ours.high


@pytest.mark.parametrize("n", [5, 8])
def test_medians_of_few_samples_are_distributed_as_scipy_says(n: int) -> None:
    data = samples(n)
    theirs = scipy_bootstrap(data).bootstrap_distribution
    same = pytest.importorskip("scipy.stats").ks_2samp(stats.bootstrap_medians(data), theirs)
    assert same.pvalue > 0.01


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = stats.estimate([float(x) for x in rng.normal(10.0, 1.0, size=25)])
        hits += found.low <= 10.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_same_samples_give_the_same_interval() -> None:
    assert stats.estimate(samples(9)) == stats.estimate(samples(9))


def test_one_sample_is_its_own_interval() -> None:
    assert stats.estimate([2.5]) == stats.Estimate(2.5, 2.5, 2.5, 1)


def test_a_drift_that_both_share_leaves_the_ratio_alone() -> None:
    speed = [30.0, 24.0, 20.0, 28.0, 15.0]
    ratio = stats.paired_ratio([0.97 * s for s in speed], speed)
    assert ratio.median == pytest.approx(0.97)
    assert ratio.high - ratio.low < 1e-9


def test_what_cannot_be_summarised_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.estimate([])
    with pytest.raises(ValueError, match="2 samples against 1"):
        stats.paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above zero"):
        stats.paired_ratio([1.0], [0.0])
    assert math.isnan(stats.mean([]))
    assert stats.stdev([4.0]) == 0.0
