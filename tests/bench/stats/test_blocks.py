"""Blocks of requests: how many, and percentiles of what is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.bench.stats import blocks, summaries


def series(n: int, likeness: float, seed: int = 0) -> list[tuple[float, ...]]:
    """Return requests whose logarithm is an autoregression."""
    rng = np.random.default_rng(seed)
    values = [rng.normal()]
    for _ in range(n - 1):
        values.append(likeness * values[-1] + (1 - likeness**2) ** 0.5 * rng.normal())
    return [(float(np.exp(0.3 * x)),) for x in values]


def test_independent_requests_give_the_most_blocks_and_alike_ones_fewer() -> None:
    assert blocks.n_blocks(series(200, 0.0)) == blocks.MOST_BLOCKS
    assert blocks.n_blocks(series(60, 0.9)) == blocks.FEWEST_BLOCKS
    assert blocks.n_blocks(series(5, 0.0)) == 5
    assert blocks.n_blocks(series(3, 0.0)) == 3


def test_likeness_is_about_the_sum_of_both_sides_of_the_autocorrelation() -> None:
    found = blocks.likeness([value for (value,) in series(4000, 0.8)])
    assert found == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.25)
    assert blocks.likeness([1.0] * 5) == 1.0


def test_every_request_is_in_one_block() -> None:
    requests = [(float(i), float(i)) if i % 3 else () for i in range(17)]
    cut = blocks.cut(requests, 4)
    assert len(cut) == 4
    assert np.concatenate(cut).tolist() == [value for request in requests for value in request]


@pytest.mark.parametrize("percent", [0.0, 50.0, 95.0, 100.0])
def test_percentiles_are_those_of_the_drawn_blocks_laid_out(percent: float) -> None:
    rng = np.random.default_rng(2)
    requests = [tuple(rng.integers(0, 9, size=rng.integers(0, 4)).astype(float).tolist()) for _ in range(25)]
    cut = blocks.cut(requests, 6)
    drawn = blocks.draws(6, seed=1)
    found = blocks.resampled(cut, percent, drawn)
    for row in range(0, len(drawn), 37):
        laid = [value for block, times in zip(cut, drawn[row], strict=True) for value in block.tolist() * int(times)]
        assert found[row] == pytest.approx(summaries.percentile(laid, percent))


def test_means_are_those_of_the_drawn_blocks_and_nothing_drawn_is_nan() -> None:
    cut = blocks.cut([(1.0, 2.0), (), (4.0,)], 3)
    drawn = np.array([[1.0, 1.0, 1.0], [0.0, 3.0, 0.0], [2.0, 0.0, 1.0]])
    assert blocks.resampled(cut, None, drawn) == pytest.approx([7 / 3, np.nan, 2.0], nan_ok=True)
    assert blocks.resampled(cut, 50.0, drawn) == pytest.approx([2.0, np.nan, 2.0], nan_ok=True)


def test_very_many_values_are_told_to_a_fraction_of_a_percent() -> None:
    rng = np.random.default_rng(3)
    requests = [tuple(rng.lognormal(sigma=0.5, size=500).tolist()) for _ in range(20)]
    cut = blocks.cut(requests, 10)
    once = np.ones((1, 10))
    everything = [value for request in requests for value in request]
    for percent in (50.0, 95.0, 99.0):
        assert blocks.resampled(cut, percent, once)[0] == pytest.approx(
            summaries.percentile(everything, percent), rel=0.01
        )
