from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.bench.reports.scales import linear_ticks, load_scale, log_ticks, tick_text, value_scale

POSITIVE = st.floats(1e-6, 1e9)


@given(POSITIVE, st.integers(2, 8))
def test_ticks_are_round_evenly_apart_and_reach_the_most(most: float, n_ticks: int) -> None:
    ticks = linear_ticks(most, n_ticks)
    assert ticks[0] == 0
    assert ticks[-1] >= most * (1 - 1e-9)
    assert 2 <= len(ticks) <= n_ticks + 2
    step = ticks[1]
    assert float(f"{step:.3g}") == pytest.approx(step)
    assert all(b - a == pytest.approx(step) for a, b in pairwise(ticks))


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(403, (0, 100, 200, 300, 400, 500)), (0.9, (0, 0.2, 0.4, 0.6, 0.8, 1)), (1, (0, 0.2, 0.4, 0.6, 0.8, 1))],
)
def test_ticks_are_those_one_would_choose(most: float, ticks: tuple[float, ...]) -> None:
    assert linear_ticks(most, 5) == ticks


@given(POSITIVE, st.floats(1.01, 1e6))
def test_logarithmic_ticks_enclose_the_values(least: float, ratio: float) -> None:
    ticks = log_ticks(least, least * ratio)
    assert ticks[0] <= least * (1 + 1e-9)
    assert ticks[-1] >= least * ratio * (1 - 1e-9)
    assert all(a < b for a, b in pairwise(ticks))


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=20))
def test_larger_values_lie_farther_and_none_outside(values: list[float]) -> None:
    scale = value_scale(values, 50.0, 450.0)
    places = [scale.at(value) for value in sorted(values)]
    assert all(50.0 <= place <= 450.0 for place in places)
    assert all(a <= b for a, b in pairwise(places))


def test_values_far_apart_get_a_logarithmic_axis() -> None:
    assert value_scale([5.0, 900.0], 0, 1).is_log
    assert not value_scale([5.0, 100.0], 0, 1).is_log
    assert not value_scale([0.0, 900.0], 0, 1).is_log
    assert value_scale([0.0], 0, 1).ticks[-1] > 0


def test_loads_are_ticks_themselves_as_far_as_there_is_room() -> None:
    assert load_scale([1, 2, 4, 8], 0, 300, 30).ticks == (1, 2, 4, 8)
    assert load_scale([1, 1.01, 4], 0, 300, 30).ticks == (1, 4)
    assert load_scale([3], 0, 300, 30).at(3) == 0
    doubled = load_scale([1, 2, 4, 8], 0, 300, 30)
    assert [doubled.at(x) for x in (1, 2, 4, 8)] == pytest.approx([0, 100, 200, 300])


def test_ticks_are_written_short() -> None:
    assert [tick_text(x) for x in (0, 0.5, 250, 9999, 12_000)] == ["0", "0.5", "250", "9999", "12k"]
