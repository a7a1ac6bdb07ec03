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


def _steps(cost: StepCost, used_cells: int, row_s: float, noise: float = 0.0, n: int = 9) -> None:
    for at in range(n):
        cost.observe(1, used_cells, row_s * (1 + noise * (at % 3 - 1)))


def test_a_cautious_figure_bounds_retained_cells_while_nothing_is_known() -> None:
    cost = StepCost()
    assert cost.cells_within(0.02) == 512
    _steps(cost, 0, 0.03)
    assert cost.cells_within(0.02) == 512  # steps at one depth tell nothing
    _steps(cost, 9000, 0.03, n=8)
    assert cost.cells_within(0.02) == 512  # too few


def test_cells_that_cost_nothing_here_may_stay() -> None:
    cost = StepCost()
    _steps(cost, 0, 0.03, noise=0.01)
    _steps(cost, 9000, 0.03, noise=0.01)
    assert 1500 < cost.cells_within(0.02) <= 16 * 512
    _steps(cost, 100_000, 0.03)
    assert cost.cells_within(0.02) == 16 * 512


def test_cells_that_cost_more_here_go_sooner() -> None:
    cost = StepCost()
    _steps(cost, 0, 0.03, noise=0.01)
    _steps(cost, 9000, 0.06, noise=0.01)
    assert 100 < cost.cells_within(0.02) < 300


@pytest.mark.parametrize("faster", [0.8, 1.0, 1.25])
def test_a_machine_that_drifts_moves_nothing(faster: float) -> None:
    """Steps at 4 096 more cells differ by 16 %; what drifts by a quarter cannot say otherwise."""
    cost = StepCost()
    _steps(cost, 0, 0.03, noise=0.2)
    _steps(cost, 5000, 0.03 * 1.16 * faster, noise=0.2)
    assert cost.cells_within(0.02) == 512


@pytest.mark.parametrize("elapsed_s", [0.0, float("inf")])
def test_steps_that_took_no_time_or_for_ever_move_nothing(elapsed_s: float) -> None:
    cost = StepCost()
    _steps(cost, 0, elapsed_s)
    _steps(cost, 9000, elapsed_s)
    assert cost.cells_within(0.02) == 512


class Clock:
    """Time that stands still until it is moved."""

    now_s = 1000.0

    def __call__(self) -> float:
        """Tell it."""
        return self.now_s


def _told(clock: Clock, *restore_s: float) -> StepCost:
    """Return a table of a machine that computes a token in a ms, after restores of so many seconds a token."""
    cost = StepCost(clock)
    for n_rows in (1, 64, 1024):
        cost.observe(n_rows, 0, n_rows * 0.001)
    for each_s in restore_s:
        cost.observe_restore(64, 64 * each_s)
    return cost


def test_restoring_pays_until_it_is_known_not_to() -> None:
    cost = StepCost()
    assert cost.restore_s(64) is None
    assert cost.restore_pays(64, 64, 0)
    cost.observe(64, 0, 0.064)
    assert cost.restore_pays(64, 64, 0)
    for _ in range(3):
        cost.observe_restore(64, 0.0064)
    assert cost.restore_s(640) == pytest.approx(0.064)
    assert cost.restore_pays(64, 64, 0)
    for _ in range(9):
        cost.observe_restore(64, 6.4)
    assert not cost.restore_pays(64, 64, 0)


@pytest.mark.parametrize("stalls", [(0.1,), (0.1, 0.1), (0.1, 0.1, 0.0001), (0.1,) * 6 + (0.0001,) * 3])
def test_restores_that_stalled_do_not_end_restoring(stalls: tuple[float, ...]) -> None:
    assert _told(Clock(), *stalls).restore_pays(1000, 1000, 0)


def test_what_did_not_pay_is_tried_again_now_and_then_and_believed_again() -> None:
    clock = Clock()
    cost = _told(clock, *(0.1,) * 9)
    assert not cost.restore_pays(1000, 1000, 0)
    clock.now_s += 59
    assert not cost.restore_pays(1000, 1000, 0)
    clock.now_s += 2
    assert cost.restore_pays(1000, 1000, 0)
    assert not cost.restore_pays(20_000, 5, 0)  # whatever it would teach
    for _ in range(3):
        cost.observe_restore(64, 0.0064)
    assert cost.restore_pays(1000, 1000, 0)


def test_what_is_put_back_is_weighed_against_what_is_saved() -> None:
    for known in ((), (0.0001,) * 3):
        cost = _told(Clock(), *known)
        assert not cost.restore_pays(20_000, 5, 0)
        assert cost.restore_pays(20_000, 4000, 0)


def test_lone_row_share_is_its_time_beside_the_prefill() -> None:
    cost = StepCost()
    cost.observe(1, 0, 0.01)
    cost.observe(256, 0, 1.0)
    assert cost.lone_row_share(256, 0) == pytest.approx(0.01)
