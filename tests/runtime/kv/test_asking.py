"""Questions to the disk are answered in turn, and one that hangs is waited for once, and not for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from localllm.runtime.kv import asking
from localllm.runtime.kv.asking import Asker, Tick, ask_once


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker()
    yield asker
    asker.close()


def seconds_of(asker: Asker, work: object = lambda tick: "answer") -> tuple[float, object]:
    begun_s = time.monotonic()
    answer = asker.ask(work)  # type: ignore[arg-type]
    return time.monotonic() - begun_s, answer


def test_answers_come_from_one_other_thread_for_all_who_ask(asker: Asker) -> None:
    answers = list[object]()

    def ask(number: int) -> None:
        answers.append(asker.ask(lambda tick: (number, threading.current_thread().name)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers, key=str) == [(number, "localllm-kv-ask") for number in range(8)]


def test_a_step_that_hangs_is_waited_for_once_and_asked_again_when_it_is_back(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "STEP_S", 0.1)
    gate = threading.Event()
    took_s, answer = seconds_of(asker, lambda tick: gate.wait(10))
    assert answer is None
    assert 0.1 <= took_s < 5
    assert asker.is_resting
    took_s = sum(seconds_of(asker)[0] for _ in range(50))
    assert took_s < 0.1, "nobody waits again"
    gate.set()
    end_s = time.monotonic() + 10
    while asker.is_resting and time.monotonic() < end_s:
        time.sleep(0.001)
    assert seconds_of(asker)[1] == "answer"


def test_all_who_wait_behind_a_step_that_hangs_are_let_go(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "STEP_S", 0.1)
    gate, asked = threading.Event(), list[int]()
    threads = [threading.Thread(target=asker.ask, args=(lambda tick: gate.wait(10),))]
    threads += [threading.Thread(target=asker.ask, args=(lambda tick: asked.append(1),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    gate.set()
    assert seconds_of(asker)[1] in ("answer", None)
    assert not asked, "what nobody waits for is not asked"


def test_a_disk_that_is_slow_is_waited_for_while_it_answers_and_then_left(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "STEP_S", 0.2)
    monkeypatch.setattr(asking, "ALL_S", 1.0)
    n_steps = [0]

    def slow(n_most: int, tick: Tick) -> str:
        for _ in range(n_most):
            time.sleep(0.02)
            n_steps[0] += 1
            tick()
        return "found"

    assert asker.ask(lambda tick: slow(20, tick)) == "found"
    n_steps[0] = 0
    assert asker.ask(lambda tick: slow(10_000, tick)) is None
    assert asker.ask(lambda tick: "next") == "next", "what was given up has ended"
    assert n_steps[0] < 200


def test_what_fails_is_no_answer_and_costs_no_other(asker: Asker) -> None:
    assert asker.ask(lambda tick: 1 // 0) is None
    assert asker.ask(lambda tick: 5) == 5


def test_after_closing_there_are_no_answers_and_nobody_waits() -> None:
    asker, gate = Asker(), threading.Event()
    thread = threading.Thread(target=asker.ask, args=(lambda tick: gate.wait(10),))
    thread.start()
    while asker._questions or asker._thread is None:
        time.sleep(0.001)
    asker.close()
    thread.join(5)
    assert not thread.is_alive()
    assert asker.ask(lambda tick: 5) is None
    gate.set()
    asker.close()


def test_one_question_alone_is_answered_fails_or_is_given_up() -> None:
    gate = threading.Event()
    assert ask_once(lambda: 5, 5.0) == 5
    with pytest.raises(ZeroDivisionError):
        ask_once(lambda: 1 // 0, 5.0)
    with pytest.raises(TimeoutError):
        ask_once(lambda: gate.wait(10), 0.05)
    gate.set()
