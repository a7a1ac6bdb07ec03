"""The step cost table learns medians and stays cautious where it knows nothing."""

from __future__ import annotations

import pytest

from localllm.runtime.cost import StepCost


def test_nothing_known_gives_no_estimate_and_the_first_guess() -> None:
    cost = StepCost()
    assert cost.estimate_s(8, 0) is None
    assert cost.lone_row_share(100, 0) is None
    assert cost.rows_within(1.0, 0, cap_rows=512, first_guess=128) == 128
    assert cost.rows_within(1.0, 0, cap_rows=64, first_guess=128) == 64


def test_one_disturbed_step_decides_nothing() -> None:
    cost = StepCost()
    for elapsed_s in (0.1, 0.1, 9.0, 0.1, 0.1):
        cost.observe(64, 0, elapsed_s)
    assert cost.estimate_s(64, 0) == pytest.approx(0.1)


@pytest.mark.parametrize("elapsed_s", [0.0, 5.0, 1e9, float("inf")])
def test_a_first_step_that_was_disturbed_is_seen_through(elapsed_s: float) -> None:
    """Weights come off the disk in the first step: without this, chunks stayed small for good."""
    cost = StepCost()
    cost.observe(128, 0, elapsed_s)
    for _ in range(40):
        rows = cost.rows_within(2.0, 0, 512, 128)
        assert rows >= 1
        cost.observe(rows, 0, rows * 0.001)
    assert cost.rows_within(2.0, 0, 512, 128) == 512


def test_rows_within_target_shrink_with_the_target() -> None:
    cost = StepCost()
    for rows in (1, 8, 64, 512):
        cost.observe(rows, 0, rows * 0.001)
    assert cost.rows_within(10.0, 0, 512, 32) == 512
    assert cost.rows_within(0.1, 0, 512, 32) == 64
    assert cost.rows_within(0.0001, 0, 512, 32) == 1


def test_full_cells_are_learned_apart_from_empty_ones() -> None:
    cost = StepCost()
    cost.observe(64, 0, 0.1)
    cost.observe(64, 20_000, 0.4)
    assert cost.estimate_s(64, 100) == pytest.approx(0.1)
    assert cost.estimate_s(64, 21_000) == pytest.approx(0.4)


def test_lone_row_share_is_its_time_beside_the_prefill() -> None:
    cost = StepCost()
    cost.observe(1, 0, 0.01)
    cost.observe(256, 0, 1.0)
    assert cost.lone_row_share(256, 0) == pytest.approx(0.01)
