"""Admission order: priority, rounds over clients, and an end to waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from localllm.runtime.order import STARVED_AFTER_S, WaitingQueue


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Waiting:
    """What the queue reads of a sequence."""

    def __init__(self, client: str, priority: int = 0) -> None:
        self.run = SimpleNamespace(client=client, priority=priority)


def _queue() -> tuple[WaitingQueue, Clock]:
    clock = Clock()
    return WaitingQueue(clock), clock


def _admit_all(queue: WaitingQueue) -> list[Any]:
    order = []
    while len(queue):
        first = next(iter(queue))
        queue.remove(first)
        order.append(first)
    return order


def test_one_client_is_served_in_order_of_arrival() -> None:
    queue, _ = _queue()
    sequences: list[Any] = [Waiting("a") for _ in range(5)]
    for sequence in sequences:
        queue.push(sequence)
    assert _admit_all(queue) == sequences


def test_a_client_with_many_requests_delays_a_newcomer_by_one() -> None:
    queue, _ = _queue()
    crowd: list[Any] = [Waiting("crowd") for _ in range(32)]
    for sequence in crowd:
        queue.push(sequence)
    for _ in range(3):
        queue.remove(next(iter(queue)))
    newcomer: Any = Waiting("newcomer")
    queue.push(newcomer)
    assert _admit_all(queue).index(newcomer) <= 1


def test_priority_goes_first_until_someone_starves() -> None:
    queue, clock = _queue()
    low: Any = Waiting("a", priority=0)
    queue.push(low)
    clock.now_s = 1.0
    high: Any = Waiting("b", priority=1)
    queue.push(high)
    assert list(queue) == [high, low]
    clock.now_s = STARVED_AFTER_S + 0.5
    assert list(queue) == [low, high]


def test_a_preempted_sequence_stands_before_newcomers() -> None:
    queue, _ = _queue()
    first: Any = Waiting("a")
    preempted: Any = Waiting("b")
    queue.push(first)
    queue.push_back(preempted)
    assert list(queue) == [preempted, first]
