"""Sweeps and their knees, on curves made up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from localllm.bench.client.calls import End
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.spec import Load, RunSpec
from localllm.bench.serving.sweep import (
    RATE_SHARES,
    Point,
    Sweep,
    knee,
    knee_of,
    next_load,
    pace_per_s,
    point,
)
from localllm.bench.slo import parse_slo
from tests.bench.client.made_up import MadeUpWorkload, outcome, result, sample


def clients(n: int, tokens_per_s: float, errors: float = 0.0, slo: bool | None = None) -> Point:
    return Point(Load(concurrency=n), tokens_per_s, 0.0, tokens_per_s / 10, errors, slo)


def rate(per_s: float, achieved_per_s: float, slo: bool | None = None) -> Point:
    return Point(Load(rate_per_s=per_s), 10 * achieved_per_s, per_s, achieved_per_s, 0.0, slo)


def swept(curve: Callable[[int], float], errors: Callable[[int], float] = lambda n: 0.0) -> list[Point]:
    points: list[Point] = []
    while (load := next_load(Sweep.CLIENTS, points)) is not None:
        n = load.concurrency or 0
        points.append(clients(n, curve(n), errors(n)))
    return points


def numbers(points: list[Point]) -> list[int]:
    return [one.load.concurrency or 0 for one in points]


def test_a_server_that_grows_with_its_clients_is_tried_up_to_64() -> None:
    points = swept(lambda n: 10.0 * n)
    assert numbers(points) == [1, 2, 4, 8, 16, 32, 64]
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=64)


def test_a_server_that_saturates_is_tried_until_it_gains_nothing() -> None:
    points = swept(lambda n: 10.0 * min(n, 8))
    assert numbers(points) == [1, 2, 4, 8, 16]
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=8)


def test_a_server_that_collapses_ends_the_sweep_and_its_peak_is_the_knee() -> None:
    points = swept(lambda n: 10.0 * n if n <= 4 else 5.0)
    assert numbers(points) == [1, 2, 4, 8]
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=4)


def test_errors_end_the_sweep_and_their_load_is_no_knee() -> None:
    points = swept(lambda n: 10.0 * n, lambda n: 0.1 if n >= 8 else 0.0)
    assert numbers(points) == [1, 2, 4, 8]
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=4)


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_two_percent_does_not_move_the_knee_far(seed: int) -> None:
    noise = random.Random(seed)
    points = swept(lambda n: 10.0 * min(n, 8) * noise.uniform(0.98, 1.02))
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=8)


def test_the_fewest_clients_win_where_more_give_next_to_nothing() -> None:
    found = knee_of([clients(1, 50.0), clients(2, 96.0), clients(4, 100.0)])
    assert found is not None
    assert found[0].load == Load(concurrency=2)


def test_the_knee_meets_the_slo() -> None:
    points = [clients(1, 10.0, slo=True), clients(2, 20.0, slo=True), clients(4, 40.0, slo=False)]
    found = knee_of(points)
    assert found is not None
    assert found[0].load == Load(concurrency=2)
    assert "SLO" in found[1]
    assert knee_of([clients(1, 10.0, slo=False), clients(2, 20.0, slo=False)]) is None


def test_rates_are_shares_of_what_eight_clients_got() -> None:
    points: list[Point] = []
    while (load := next_load(Sweep.RATES, points, 0.5)) is not None:
        points.append(Point(load, 0.0, load.rate_per_s or 0.0, 4.0 if load.concurrency else 1.0))
    assert points[0].load == Load(concurrency=8)
    assert [one.load.rate_per_s for one in points[1:]] == [pytest.approx(4.0 * share) for share in RATE_SHARES]
    assert {one.load.shape for one in points[1:]} == {0.5}


def test_a_server_that_keeps_up_is_given_more_until_it_does_not() -> None:
    points: list[Point] = []
    while (load := next_load(Sweep.RATES, points)) is not None:
        per_s = load.rate_per_s or 4.0
        points.append(rate(per_s, min(per_s, 7.0)) if load.rate_per_s else Point(load, 0.0, 0.0, 4.0))
    rates = [one.load.rate_per_s for one in points[1:]]
    assert rates[: len(RATE_SHARES)] == [pytest.approx(4.0 * share) for share in RATE_SHARES]
    assert rates[len(RATE_SHARES) :] == [pytest.approx(value, rel=0.01) for value in (5.5, 6.88, 8.6)]
    found = knee_of(points[1:])
    assert found is not None
    assert found[0].load.rate_per_s == pytest.approx(6.88)
    assert "more was not tried" not in found[1]


def test_a_sweep_of_rates_ends_at_four_times_what_eight_clients_got() -> None:
    points: list[Point] = []
    while (load := next_load(Sweep.RATES, points)) is not None:
        per_s = load.rate_per_s or 4.0
        points.append(rate(per_s, per_s) if load.rate_per_s else Point(load, 0.0, 0.0, 4.0))
    assert 12.0 < (points[-1].load.rate_per_s or 0.0) <= 16.0
    found = knee_of(points[1:])
    assert found is not None
    assert "more was not tried" in found[1]


def test_no_rate_is_tried_where_nothing_was_answered() -> None:
    assert next_load(Sweep.RATES, [Point(Load(concurrency=8), 0.0, 0.0, 0.0, 1.0)]) is None


def test_the_largest_rate_that_is_kept_up_with_is_the_knee() -> None:
    found = knee_of([rate(1.0, 1.0), rate(2.0, 1.95), rate(3.0, 2.4), rate(4.0, 2.4)])
    assert found is not None
    assert found[0].load == Load(rate_per_s=2.0)


def test_no_rate_that_falls_behind_is_a_knee() -> None:
    assert knee_of([rate(2.0, 1.0), rate(3.0, 1.0)]) is None


def test_a_rate_that_breaks_the_slo_is_no_knee() -> None:
    found = knee_of([rate(1.0, 1.0, slo=True), rate(2.0, 2.0, slo=False)])
    assert found is not None
    assert found[0].load == Load(rate_per_s=1.0)


def test_the_pace_of_moments_is_found_without_the_wait_of_the_last() -> None:
    noise = random.Random(4)
    due_s = [n / 2 for n in range(32)]
    ended_s = [moment + 3.0 + noise.uniform(-1, 1) for moment in due_s]
    assert pace_per_s(due_s) == pytest.approx(2.0)
    assert pace_per_s(ended_s) == pytest.approx(2.0, rel=0.05)
    assert 31 / (max(ended_s) - min(due_s)) < 0.9 * 2.0  # what n / duration would say


def test_the_pace_of_a_server_that_falls_behind_is_its_own() -> None:
    ended_s = [5.0 + n for n in range(32)]  # one a second, whatever came
    assert pace_per_s(ended_s) == pytest.approx(1.0)


def test_there_is_no_pace_of_one_moment() -> None:
    assert pace_per_s([1.0]) == pace_per_s([]) == pace_per_s([2.0, 2.0]) == 0.0


def run_at(load: Load, gap_s: float, n: int = 20, end: End = End.ANSWER, first_s: float = 0.1) -> RunResult:
    per_s = load.rate_per_s or 1.0
    samples = [
        sample(
            outcome(
                end,
                due_s=i / per_s,
                started_s=i / per_s,
                ended_s=1.0 + i * gap_s,
                token_s=(i / per_s + first_s, 1.0 + i * gap_s),
                completion_tokens=4,
            )
        )
        for i in range(n)
    ]
    spec = RunSpec(MadeUpWorkload(), load)
    return result(*samples, spec=spec, duration_s=1.0 + n * gap_s)


def test_a_run_becomes_a_point_of_what_came_and_what_was_answered() -> None:
    found = point(run_at(Load(rate_per_s=2.0), 1.0), None)
    assert found.offered_per_s == pytest.approx(2.0)
    assert found.achieved_per_s == pytest.approx(1.0)
    assert not found.keeps_up
    assert found.meets_slo is None


def test_a_run_is_judged_by_the_slo_of_the_knee() -> None:
    slow = run_at(Load(rate_per_s=2.0), 0.5, first_s=0.3)
    assert point(slow, parse_slo("ttft_p95=200ms")).meets_slo is False
    assert point(slow, parse_slo("ttft_p95=400ms")).meets_slo is True


def test_the_knee_of_runs_names_their_cache_and_what_it_gives() -> None:
    runs = [run_at(Load(rate_per_s=1.0), 1.0), run_at(Load(rate_per_s=2.0), 0.5), run_at(Load(rate_per_s=4.0), 0.5)]
    found = knee(runs, None)
    assert found is not None
    assert found.load == Load(rate_per_s=2.0)
    assert found.cache == "cold"
    assert found.requests_per_s == pytest.approx(20 / (1.0 + 19 * 0.5))


def test_one_load_has_no_knee() -> None:
    assert knee([run_at(Load(rate_per_s=1.0), 1.0)], None) is None
