"""Frames arrive whole however they are cut, and events come back equal."""

from __future__ import annotations

import pytest

from localllm.errors import ContextOverflow
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationOptions, Request
from localllm.worker import protocol
from localllm.worker.protocol import BadFrame, FrameReader, Happened

TOP = events.TokenLogprob(3, b"\xff", -2.0)
EVENTS: tuple[Event, ...] = (
    events.Queued("a" * 24, 2),
    events.Admitted(7, {"device": 3}, 2**63 + 1, 9),
    events.Progress(3, 7),
    events.Token(1, "é", (5, 6), (events.TokenLogprob(5, b"\xc3", -0.5, (TOP,)), TOP)),
    events.Token(0, "", ()),
    events.Embedded(4, b"\0\0\x80?"),
    events.Finished(0, "stop", "END"),
    events.Finished(0, "length"),
    events.Usage(7, 4, {"device": 3}, 1, 2, {"queue": 0.5}),
    events.Error("context_length_exceeded", "Too long.", "shorten it", 1, {"n_ctx": 512}),
    events.Done(),
)
REQUESTS: tuple[Request, ...] = (
    ChatRequest(({"role": "user", "content": [{"type": "text", "text": "x"}]},), GenerationOptions(seed=2**64 - 1)),
    CompletionRequest((1, 2), GenerationOptions(sampling={"logit_bias": ((5, -1.0),), "top_k": 3}, stop=("a",))),
    CompletionRequest("text", suffix="end"),
    EmbeddingRequest(("a", (1, 2, 3))),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_equal(event: Event) -> None:
    frame = protocol.pack(Happened(1.5, [(3, [protocol.event_to_wire(event)])]))
    (back,) = FrameReader().feed(frame)
    assert isinstance(back, Happened)
    assert [(n, [protocol.event_from_wire(wire) for wire in wires]) for n, wires in back.entries] == [(3, [event])]


def test_every_event_has_a_place_on_the_wire() -> None:
    assert {type(event) for event in EVENTS} == set(protocol.KINDS) == set(events.Event.__args__)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_comes_back_equal_but_for_lists(request_: Request) -> None:
    (frame,) = FrameReader().feed(protocol.pack(protocol.submit_frame(7, request_)))
    assert isinstance(frame, protocol.Submit)
    back = protocol.request_of(frame)
    assert type(back) is type(request_)
    assert protocol.pack(protocol.submit_frame(7, back)) == protocol.pack(frame)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 17])
def test_frames_may_arrive_in_any_pieces(cut: int) -> None:
    sent = [protocol.Cancel(n) for n in range(5)]
    data = b"".join(protocol.pack(frame) for frame in sent)
    reader, got = FrameReader(), []
    for at in range(0, len(data), cut):
        got += list(reader.feed(data[at : at + cut]))
    assert got == sent


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x01\0\0\0\xc1",
        b"\x01\0\0\0\x90",
        protocol.LENGTH.pack(2) + b"\x91\xa0",
        protocol.LENGTH.pack(200) + b"\x91" * 200,
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        list(FrameReader().feed(data))


@pytest.mark.parametrize("wire", [[], [99], [3], [7, 1], ["x"], [3, 0, "", 5, 5]])
def test_what_is_no_event_is_refused(wire: list[object]) -> None:
    with pytest.raises(BadFrame):
        protocol.event_from_wire(wire)


def test_an_error_travels_with_its_numbers_alone() -> None:
    error = ContextOverflow("Too long.", "shorten it", n_ctx=5, largest=lambda: 3)
    assert protocol.failure_event(protocol.failure(3, error)) == events.Error(
        "context_length_exceeded", "Too long.", "shorten it", details={"n_ctx": 5}
    )
