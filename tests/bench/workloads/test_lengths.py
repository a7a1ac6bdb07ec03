"""Lengths are log-normal, clipped, and have the mean that is written down."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0, 2.0])
def test_lengths_have_the_median_and_mean_that_are_stated(sigma: float) -> None:
    of, draws = Lengths(200, sigma), Draws("lengths")
    found = [of.draw(draws) for _ in range(4_000)]
    assert median(found) == pytest.approx(200, rel=0.06)
    assert fmean(found) == pytest.approx(of.mean, rel=0.04)
    assert of.least <= min(found) <= max(found) <= of.most
    assert (of.least, of.most) == (50, 800)


@pytest.mark.parametrize(("of", "only"), [(Lengths(30, 0), 30), (Lengths(0, 0.5), 0), (Lengths(0, 0), 0)])
def test_without_spread_or_median_there_is_one_length(of: Lengths, only: int) -> None:
    draws = Draws("one")
    assert {of.draw(draws) for _ in range(20)} == {only}
    assert of.mean == only


def test_a_length_of_one_never_becomes_none() -> None:
    draws = Draws("short")
    assert {Lengths(1, 1.5).draw(draws) for _ in range(200)} >= {1, 2}
    assert Lengths(1, 1.5).least == 1


def test_drawn_lengths_are_pinned() -> None:
    draws = Draws(1, "pinned")
    assert [Lengths(600, 0.4).draw(draws) for _ in range(5)] == PINNED


def test_facts_name_the_distribution() -> None:
    assert Lengths(40, 0.4).facts() == {
        "unit": "words",
        "shape": "lognormal",
        "median": 40,
        "sigma": 0.4,
        "least": 10,
        "most": 160,
        "mean": 43.3,
    }
    assert Lengths(8, 0, "tokens").facts() == {"unit": "tokens", "shape": "constant", "median": 8}


PINNED = [737, 493, 759, 596, 440]
