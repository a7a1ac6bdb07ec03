"""Whoever ends a request first ends it: nothing follows its terminal event."""

from __future__ import annotations

import pytest

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.types import CompletionRequest, EmbeddingRequest, GenerationOptions, Request
from localllm.worker.delivery import Delivery, GoneAlready

ERROR = events.Error("engine_error", "It failed.")
TWO = CompletionRequest("x", GenerationOptions(n=2))


class Kept:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended: list[int] = []

    def add(self, number: int, batch: list[Event]) -> None:
        assert number == 3
        self.events += batch

    def delivery(self, request: Request = TWO) -> Delivery:
        return Delivery(3, request, self, self.ended.append)  # type: ignore[arg-type]


def test_what_follows_the_last_event_is_dropped() -> None:
    kept = Kept()
    delivery = kept.delivery()
    delivery.put([events.Queued("a", 0)])
    assert not delivery.is_over
    delivery.put([ERROR])
    delivery.put([events.Done()])
    delivery.put([])
    assert kept.events == [events.Queued("a", 0), ERROR]
    assert kept.ended == [3]
    assert delivery.is_over


def test_a_cancel_before_it_is_let_in_ends_it_whatever_comes() -> None:
    kept = Kept()
    delivery = kept.delivery()
    assert not delivery.cancel()
    assert not delivery.cancel()
    with pytest.raises(GoneAlready):
        delivery.let_in()
    delivery.put([ERROR])
    reasons = [event.reason for event in kept.events if isinstance(event, events.Finished)]
    assert (reasons, kept.events[-1], kept.ended) == (["cancelled"] * 2, events.Done(), [3])


def test_a_cancel_after_it_was_let_in_is_the_runtimes() -> None:
    kept = Kept()
    delivery = kept.delivery()
    delivery.let_in()
    assert delivery.cancel()
    assert kept.events == []


def test_a_refused_request_cannot_be_cancelled_any_more() -> None:
    kept = Kept()
    delivery = kept.delivery()
    delivery.put([ERROR])
    delivery.cancel()
    assert kept.events == [ERROR]


@pytest.mark.parametrize(
    ("request_", "n_finished"),
    [(EmbeddingRequest(("a",)), 0), (CompletionRequest("x", GenerationOptions(n=10**9)), 16)],
)
def test_as_many_choices_end_as_there_can_be(request_: Request, n_finished: int) -> None:
    kept = Kept()
    kept.delivery(request_).cancel()
    assert sum(isinstance(event, events.Finished) for event in kept.events) == n_finished
