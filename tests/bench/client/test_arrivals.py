from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from scipy import stats

from localllm.bench.client.arrivals import arrival_offsets
from localllm.errors import UsageError

N = 4000


def between_s(rate_per_s: float, shape: float, seed: int = 1) -> list[float]:
    offsets = [0.0, *islice(arrival_offsets(rate_per_s, shape, seed), N)]
    return [b - a for a, b in pairwise(offsets)]


@pytest.mark.parametrize("rate_per_s", [0.5, 20.0])
@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_times_between_arrivals_have_the_mean_and_spread_that_were_asked_for(rate_per_s: float, shape: float) -> None:
    times_s = between_s(rate_per_s, shape)
    spread = 1 / np.sqrt(shape)
    assert np.mean(times_s) == pytest.approx(1 / rate_per_s, rel=4 * spread / np.sqrt(N))
    assert np.std(times_s) / np.mean(times_s) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_times_between_arrivals_are_gamma_distributed(shape: float) -> None:
    times_s = between_s(3.0, shape)
    assert stats.kstest(times_s, stats.gamma(shape, scale=1 / (3.0 * shape)).cdf).pvalue > 0.01
    assert stats.kstest(times_s, stats.gamma(2 * shape, scale=1 / (6.0 * shape)).cdf).pvalue < 1e-6


def test_a_shape_of_one_is_a_poisson_process() -> None:
    assert stats.kstest(between_s(3.0, 1.0), stats.expon(scale=1 / 3.0).cdf).pvalue > 0.01
    counts, _ = np.histogram(np.cumsum(between_s(3.0, 1.0)), bins=np.arange(0.0, 1000.0, 1.0))
    assert np.var(counts) / np.mean(counts) == pytest.approx(1, abs=0.2)  # arrivals a second: Poisson's variance


def test_the_same_seed_gives_the_same_arrivals() -> None:
    first, again = (list(islice(arrival_offsets(2.0, 0.5, 7), 600)) for _ in range(2))
    assert first == again
    assert first != list(islice(arrival_offsets(2.0, 0.5, 8), 600))
    assert first == sorted(first)


@pytest.mark.parametrize(
    ("rate_per_s", "shape"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, float("inf"))]
)
def test_what_is_no_rate_or_shape_is_refused_before_anything_is_sent(rate_per_s: float, shape: float) -> None:
    with pytest.raises(UsageError):
        arrival_offsets(rate_per_s, shape, 1)
