"""The watchdog, on a clock that the tests move."""

from __future__ import annotations

import math

import pytest

from localllm.worker.board import BoardState
from localllm.worker.watchdog import LoadWatch, Sight, Watchdog, allowed_s, is_overdue

IDLE = BoardState(step=4)


def running(started_s: float, expected_s: float | None = None, step: int = 5) -> BoardState:
    return BoardState(step, True, started_s, expected_s, (1,))


def sight(board: BoardState = IDLE, n_frames: int = 0, n_engine: int = 0, engine: bool = True) -> Sight:
    return Sight(board, n_frames, n_engine, is_engine_asked=engine, is_asked=True)


@pytest.mark.parametrize(
    ("limit_s", "expected_s", "allowed"),
    [
        (60, None, 60),
        (60, 0.2, 60),
        (60, 30.0, 300),
        (2, 0.5, 5),
        (2, 1e9, 3600),
        (2, math.inf, 3600),
        (2, math.nan, 2),
        (2, -5.0, 2),
    ],
)
def test_a_step_may_take_the_larger_of_the_limit_and_ten_times_its_time(
    limit_s: float, expected_s: float | None, allowed: float
) -> None:
    assert allowed_s(limit_s, expected_s) == allowed


def test_a_step_is_overdue_only_while_it_runs() -> None:
    assert is_overdue(running(0.0), 61.0, 60.0)
    assert not is_overdue(running(0.0), 59.0, 60.0)
    assert not is_overdue(IDLE, 1000.0, 60.0)


def watch(sights: list[tuple[float, Sight]], limit_s: float = 2.0) -> float | None:
    """Return when the watchdog fires."""
    dog = Watchdog(limit_s)
    dog.begin(sights[0][0])
    for now_s, seen in sights:
        if dog.look(now_s, seen):
            return now_s
    return None


def ticks(until_s: float) -> list[float]:
    return [0.25 * i for i in range(int(until_s / 0.25) + 1)]


def test_a_hung_step_is_seen_whatever_other_threads_still_answer() -> None:
    fired = watch([(t, sight(running(0.0), n_frames=int(t * 10))) for t in ticks(5)])
    assert fired == 2.25


def test_steps_that_go_on_are_progress() -> None:
    assert watch([(t, sight(running(t - 0.1, step=int(t * 4)))) for t in ticks(20)]) is None


def test_an_engine_that_stops_between_steps_is_seen() -> None:
    assert watch([(t, sight(IDLE)) for t in ticks(5)]) == 2.25


def test_refusals_of_new_requests_are_no_sign_of_the_engine() -> None:
    assert watch([(t, sight(IDLE, n_frames=int(t * 10))) for t in ticks(5)]) == 2.25


def test_events_of_its_requests_are_a_sign_of_the_engine() -> None:
    assert watch([(t, sight(IDLE, n_frames=int(t * 4), n_engine=int(t * 4))) for t in ticks(9)]) is None


def test_requests_still_in_preparation_need_any_sign() -> None:
    assert watch([(t, sight(IDLE, n_frames=int(t), engine=False)) for t in ticks(9)]) is None
    assert watch([(t, sight(IDLE, engine=False)) for t in ticks(9)]) == 2.25


def test_a_request_that_reaches_the_engine_late_has_its_whole_time() -> None:
    before = [(t, sight(IDLE, n_frames=int(t), engine=False)) for t in ticks(1.75)]
    after = [(t, sight(IDLE, n_frames=2)) for t in ticks(6) if t >= 2]
    assert watch([*before, *after]) == 4.25


def test_time_in_which_the_watcher_itself_was_stopped_is_forgiven() -> None:
    stopped = [(0.25, sight(running(0.0))), (100.0, sight(running(0.0))), (100.25, sight(running(0.0)))]
    assert watch(stopped) is None
    assert watch([*stopped, *((100.25 + t, sight(running(0.0))) for t in ticks(3))]) == 102.25


def test_nobody_waiting_is_never_stuck() -> None:
    idle = Sight(running(0.0), 0, 0, is_engine_asked=False, is_asked=False)
    assert watch([(t, idle) for t in ticks(9)]) is None


def test_work_that_begins_again_starts_a_new_count() -> None:
    dog = Watchdog(2.0)
    dog.begin(0.0)
    assert not dog.look(0.25, sight(IDLE))
    dog.begin(50.0)
    assert not dog.look(50.25, sight(IDLE))
    assert not dog.look(52.0, sight(IDLE))
    assert dog.look(52.5, sight(IDLE))


@pytest.mark.parametrize(("limit_s", "tick_s"), [(60.0, 1.0), (2.0, 0.25)])
def test_it_looks_seldom_but_often_enough(limit_s: float, tick_s: float) -> None:
    assert Watchdog(limit_s).tick_s == tick_s


def test_a_load_that_uses_no_processor_time_is_stuck() -> None:
    load = LoadWatch(6.0, 0, now_s=0.0)
    assert not any(load.look(t, 0.1 * t) for t in ticks(100))
    assert not load.look(105.0, 10.0)
    assert load.look(106.5, 10.0)


def test_a_load_that_works_for_ever_is_stuck_in_the_end() -> None:
    load = LoadWatch(60.0, 10**9, now_s=0.0)
    assert not load.look(799.0, 799.0)
    assert load.look(801.0, 801.0)


def test_a_load_whose_time_is_not_told_is_only_limited_in_all() -> None:
    load = LoadWatch(6.0, 0, now_s=0.0)
    assert not any(load.look(t, None) for t in ticks(100))
    assert load.look(601.0, None)
