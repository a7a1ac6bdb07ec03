"""Medians, spreads and intervals against scipy, and against cases that are known by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from localllm.bench.stats import summaries


def samples(n: int, seed: int = 3) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).lognormal(mean=1.0, sigma=0.3, size=n)]


@pytest.mark.parametrize("n", [2, 5, 6, 31])
def test_mean_median_and_spread_agree_with_scipy(n: int) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    data = samples(n)
    assert summaries.mean(data) == pytest.approx(scipy_stats.tmean(data))
    assert summaries.stdev(data) == pytest.approx(scipy_stats.tstd(data))
    assert summaries.median(data) == pytest.approx(scipy_stats.scoreatpercentile(data, 50))


def scipy_bootstrap(data: list[float]) -> Any:
    return pytest.importorskip("scipy.stats").bootstrap(
        (data,), np.median, method="percentile", n_resamples=4000, rng=np.random.default_rng(1), vectorized=True
    )


def test_interval_agrees_with_scipy_bootstrap() -> None:
    data = samples(60)
    other, ours = scipy_bootstrap(data).confidence_interval, summaries.estimate(data)
    width = other.high - other.low
    assert abs(ours.low - other.low) < 0.1 * width
    assert abs(ours.high - other.high) < 0.1 * width
    assert ours.low <= ours.median <= ours.high


@pytest.mark.parametrize("n", [5, 8])
def test_medians_of_few_samples_are_distributed_as_scipy_says(n: int) -> None:
    data = samples(n)
    theirs = scipy_bootstrap(data).bootstrap_distribution
    same = pytest.importorskip("scipy.stats").ks_2samp(summaries.bootstrap_medians(data), theirs)
    assert same.pvalue > 0.01


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        found = summaries.estimate([float(x) for x in rng.normal(10.0, 1.0, size=25)])
        hits += found.low <= 10.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_same_samples_give_the_same_interval() -> None:
    assert summaries.estimate(samples(9)) == summaries.estimate(samples(9))


def test_one_sample_is_its_own_interval() -> None:
    assert summaries.estimate([2.5]) == summaries.Estimate(2.5, 2.5, 2.5, 1)


def test_a_drift_that_both_share_leaves_the_ratio_alone() -> None:
    speed = [30.0, 24.0, 20.0, 28.0, 15.0]
    ratio = summaries.paired_ratio([0.97 * s for s in speed], speed)
    assert ratio.median == pytest.approx(0.97)
    assert ratio.high - ratio.low < 1e-9


def test_what_cannot_be_summarised_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summaries.estimate([])
    with pytest.raises(ValueError, match="2 samples against 1"):
        summaries.paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="above zero"):
        summaries.paired_ratio([1.0], [0.0])
    assert math.isnan(summaries.mean([]))
    assert summaries.stdev([4.0]) == 0.0


@pytest.mark.parametrize("percent", [0, 12.5, 50, 95, 99, 100])
def test_percentiles_are_numpys_linear_ones(percent: float) -> None:
    data = samples(37)
    assert summaries.percentile(data, percent) == float(np.percentile(data, percent, method="linear"))
    assert math.isnan(summaries.percentile([], percent))


def test_adjusted_p_values_are_scipys() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(3)
    for n in (1, 2, 7, 40):
        p_values = [float(p) for p in rng.random(n) ** 2]
        assert summaries.adjusted(p_values) == pytest.approx(list(scipy_stats.false_discovery_control(p_values)))
    assert summaries.adjusted([]) == []
