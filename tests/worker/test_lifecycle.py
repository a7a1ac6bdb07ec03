"""When a dead worker is started again."""

from __future__ import annotations

from localllm.worker.lifecycle import ModelState, Restarts


def test_restarts_come_later_and_later_and_end_at_the_fifth_death() -> None:
    restarts = Restarts()
    assert [restarts.died() for _ in range(6)] == [0.0, 1.0, 5.0, 30.0, None, None]


def test_a_good_answer_makes_good() -> None:
    restarts = Restarts()
    for _ in range(4):
        restarts.died()
    restarts.answered()
    assert restarts.died() == 0.0


def test_states_are_told_in_lower_case() -> None:
    assert all(state.value == state.name.lower() for state in ModelState)
