"""Requests and calls reach a service by frames; each ends exactly once, whenever it is cancelled."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from localllm.runtime import events
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.events import Event
from localllm.runtime.hooks import Hooks
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationOptions, Request
from localllm.worker import protocol
from localllm.worker.desk import Desk
from localllm.worker.gate import Gate
from localllm.worker.main import judge
from localllm.worker.outgoing import Outgoing
from localllm.worker.protocol import (
    AnyFrame,
    BadFrame,
    Call,
    Cancel,
    Failed,
    FrameReader,
    Happened,
    Result,
    Submit,
    event_from_wire,
    submit_frame,
)
from tests.fake_engine import N_VOCAB, FakeEngine, endless_token, fake_service
from tests.worker.lone_worker import is_over, text_of, wait_until

CHAT = ChatRequest(({"role": "user", "content": "hello"},), GenerationOptions(max_tokens=9))


class Linked:
    """A desk over a FakeEngine in this process, and what it sends, read by a thread."""

    def __init__(self, engine: FakeEngine | None = None, config: RuntimeConfig = RuntimeConfig()) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._outgoing = outgoing = Outgoing(self._theirs)
        gate = Gate(b"k" * 32)
        hooks = Hooks(gate=partial(judge, gate, outgoing), published=outgoing.publish)
        self.service = fake_service(engine, config=config, hooks=hooks)
        self.desk = Desk(self.service, outgoing, config.max_waiting)
        self.frames: list[AnyFrame] = []
        self.events: dict[int, list[Event]] = {}
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reader = FrameReader()
        while data := self._ours.recv(1 << 16):
            with self._news:
                for frame in reader.feed(data):
                    self.frames.append(frame)
                    for number, wires in frame.entries if isinstance(frame, Happened) else ():
                        self.events.setdefault(number, []).extend(map(event_from_wire, wires))
                self._news.notify_all()

    def wait(self, holds: Callable[[], Any]) -> None:
        with self._news:
            assert self._news.wait_for(holds, 20), "it never came to hold"

    def answer(self, number: int) -> list[Event]:
        self.wait(lambda: is_over(self.events.get(number, [])))
        return self.events[number]

    def submit(self, number: int, request: Request) -> None:
        self.desk.take(submit_frame(number, request))

    def call(self, number: int, verb: str, argument: Any = None) -> Result | Failed:
        self.desk.take(Call(number, verb, argument))
        found: list[Result | Failed] = []

        def is_there() -> bool:
            found[:] = [f for f in self.frames if isinstance(f, (Result, Failed)) and f.number == number]
            return bool(found)

        self.wait(is_there)
        return found[0]

    def close(self) -> None:
        self.service.close()
        self._outgoing.close()
        self.desk._pool.shutdown()
        self._theirs.close()
        self._thread.join(5)
        self._ours.close()


@pytest.fixture
def link() -> Iterator[Callable[..., Linked]]:
    made: list[Linked] = []

    def make(*args: Any, **settings: Any) -> Linked:
        made.append(Linked(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def slow(step_s: float) -> FakeEngine:
    return FakeEngine(script=endless_token, on_forward=lambda batch: time.sleep(step_s))


def test_an_answer_is_that_of_the_service_itself(link: Callable[..., Linked]) -> None:
    linked = link()
    linked.submit(1, CHAT)
    with fake_service() as alone:
        wanted = list(alone.submit(CHAT))
    answer = linked.answer(1)
    assert [type(event) for event in answer] == [type(event) for event in wanted]
    assert text_of(answer) == text_of(wanted) != ""


def test_what_prepare_refuses_comes_as_one_error_event(link: Callable[..., Linked]) -> None:
    linked = link()
    linked.submit(1, CompletionRequest("x" * 5000))
    (error,) = linked.answer(1)
    assert isinstance(error, events.Error)
    assert (error.code, error.details["n_ctx"]) == ("context_length_exceeded", 4096)
    linked.submit(2, CompletionRequest("x", GenerationOptions(sampling={"temperature": -1})))
    (error,) = linked.answer(2)
    assert isinstance(error, events.Error)
    assert (error.code, error.details["field"]) == ("invalid_request", "temperature")


def test_a_failure_nobody_foresaw_tells_its_kind_only(
    link: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("the prompt itself")

    linked = link()
    monkeypatch.setattr(linked.service, "submit", fail)
    linked.submit(1, CHAT)
    (error,) = linked.answer(1)
    assert isinstance(error, events.Error)
    assert (error.code, "KeyError" in error.message, "prompt itself" in error.message) == (
        "internal_error",
        True,
        False,
    )


def test_a_cancelled_request_ends_within_a_step(link: Callable[..., Linked]) -> None:
    linked = link(slow(0.01))
    linked.submit(1, CHAT.__class__(CHAT.messages, GenerationOptions(max_tokens=2000, n=2)))
    linked.wait(lambda: text_of(linked.events.get(1, []), 1))
    n_before = linked.service.stats().n_steps
    linked.desk.take(Cancel(1))
    answer = linked.answer(1)
    assert linked.service.stats().n_steps - n_before <= 2
    ends = {e.choice: e.reason for e in answer if isinstance(e, events.Finished)}
    assert ends == {0: "cancelled", 1: "cancelled"}
    assert isinstance(answer[-1], events.Done)


def test_a_request_that_is_cancelled_while_it_is_prepared_ends_at_once_and_is_never_queued(
    link: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, go = link(), threading.Event()
    encode = linked.service.tokenizer.encode
    monkeypatch.setattr(type(linked.service.tokenizer), "encode", lambda self, *a, **k: go.wait(10) and encode(*a, **k))
    linked.submit(1, ChatRequest(CHAT.messages, GenerationOptions(n=3)))
    linked.submit(2, CompletionRequest("a"))
    linked.submit(3, CompletionRequest("b"))  # behind the two that are being prepared
    linked.desk.take(Cancel(1))
    linked.desk.take(Cancel(3))
    assert linked.answer(1) == [
        *(events.Finished(choice, "cancelled") for choice in range(3)),
        events.Usage(0, 0, {}),
        events.Done(),
    ]
    assert linked.answer(3)[-1] == events.Done()
    go.set()
    linked.answer(2)
    wait_until(lambda: not linked.desk._n_preparing)
    linked.call(9, "ping")
    assert linked.service.stats().n_prompt_tokens_computed <= 3  # the second's alone
    assert len([1 for number, batch in linked.events.items() for event in batch if event == events.Done()]) == 3


def test_cancelling_what_is_over_or_never_was_does_nothing(link: Callable[..., Linked]) -> None:
    linked = link()
    linked.submit(1, CHAT)
    before = len(linked.answer(1))
    linked.desk.take(Cancel(1))
    linked.desk.take(Cancel(77))
    linked.call(5, "ping")
    assert len(linked.events[1]) == before
    assert 77 not in linked.events


def test_each_request_ends_once_however_submits_and_cancels_meet(link: Callable[..., Linked]) -> None:
    linked = link(FakeEngine())
    random.seed(7)
    for number in range(300):
        linked.submit(number, CompletionRequest(f"{number}", GenerationOptions(max_tokens=random.randint(1, 20))))
        if random.random() < 0.7:
            if random.random() < 0.5:
                time.sleep(random.random() * 0.003)
            linked.desk.take(Cancel(random.randint(max(0, number - 3), number)))
        linked.wait(lambda at=number: sum(map(is_over, linked.events.values())) > at - 60)
    for number in range(300):
        answer = linked.answer(number)
        assert sum(isinstance(event, (events.Done, events.Error)) for event in answer) == 1
    linked.call(1000, "ping")
    stats = linked.service.stats()
    assert (stats.n_running, stats.n_waiting) == (0, 0)
    assert not linked.desk._deliveries


def test_beyond_the_queue_a_request_is_refused(link: Callable[..., Linked]) -> None:
    linked = link(slow(0.02), RuntimeConfig(max_waiting=3, max_running=1))
    for number in range(20):
        linked.submit(number, CompletionRequest("x", GenerationOptions(max_tokens=500)))
    linked.wait(lambda: sum(is_over(batch) for batch in linked.events.values()) >= 16)
    refused = [batch for batch in linked.events.values() if is_over(batch)]
    assert all(isinstance(batch[-1], events.Error) and batch[-1].code == "queue_full" for batch in refused)
    for number in range(20):
        linked.desk.take(Cancel(number))
    for number in range(20):
        linked.answer(number)


def test_a_number_in_use_and_a_request_that_is_none_end_the_connection(link: Callable[..., Linked]) -> None:
    linked = link(slow(0.05))
    linked.submit(1, CHAT)
    with pytest.raises(BadFrame):
        linked.submit(1, CHAT)
    with pytest.raises(BadFrame):
        linked.desk.take(Submit(2, "chat", {"messages": 5}))
    with pytest.raises(BadFrame):
        linked.desk.take(Submit(3, "poem", {}))


def test_calls_tell_of_tokens_and_prompts(link: Callable[..., Linked]) -> None:
    linked = link()
    wire = submit_frame(0, CHAT)
    prompt = {"kind": wire.kind, "request": wire.request}
    assert linked.call(1, "tokenize", {"text": "hé"}) == Result(1, {"tokens": [104, 195, 169]})
    pieces = linked.call(2, "tokenize", {"text": "é</s>", "parse_special": True, "add_bos": True, "with_pieces": True})
    assert pieces == Result(
        2, {"tokens": [256, 195, 169, 257], "pieces": [[60, 115, 62], [195], [169], [60, 47, 115, 62]]}
    )
    assert linked.call(3, "detokenize", {"tokens": [104, 195, 169]}) == Result(3, {"text": "hé"})
    assert linked.call(4, "template", prompt) == Result(4, {"prompt": "<s><|user|>hello<|assistant|>", "n_tokens": 8})
    assert linked.call(5, "prompt_tokens", prompt) == Result(5, {"tokens": linked.service.prompt_tokens(CHAT)})
    assert linked.call(6, "ping") == Result(6, {})
    stats = linked.call(7, "stats")
    assert isinstance(stats, Result)
    assert stats.value["n_running"] == 0
    assert stats.value["rss_bytes"] > 10_000_000


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("fly", None),
        ("tokenize", None),
        ("tokenize", {"text": 5}),
        ("tokenize", {"text": "x", "more": 1}),
        ("detokenize", {"tokens": [N_VOCAB]}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": "x"}),
        ("template", {"kind": "chat", "request": {}}),
        ("template", {"kind": "completion", "request": {"prompt": "x"}}),
        ("prompt_tokens", {"kind": "poem", "request": {}}),
    ],
)
def test_a_call_that_cannot_be_answered_fails_and_harms_nothing(
    link: Callable[..., Linked], verb: str, argument: Any
) -> None:
    linked = link()
    failed = linked.call(1, verb, argument)
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_request"
    assert isinstance(linked.call(2, "ping"), Result)


def test_an_answer_too_large_for_a_frame_is_an_error(
    link: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = link()
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 5000)
    failed = linked.call(1, "tokenize", {"text": "x" * 6000})
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_request"


def test_a_ping_is_answered_between_two_steps_and_not_by_a_model_that_was_closed(link: Callable[..., Linked]) -> None:
    linked = link(slow(0.05))
    linked.submit(1, CompletionRequest("x", GenerationOptions(max_tokens=50)))
    linked.wait(lambda: text_of(linked.events.get(1, [])))
    assert isinstance(linked.call(2, "ping"), Result)
    linked.service.close()
    failed = linked.call(3, "ping")
    assert isinstance(failed, Failed)
    assert failed.code == "unavailable"


def test_texts_are_embedded_and_can_be_cancelled(link: Callable[..., Linked]) -> None:
    linked = link()
    linked.submit(1, EmbeddingRequest(("a", "bc", (100, 101, 102))))
    answer = linked.answer(1)
    assert [event.index for event in answer if isinstance(event, events.Embedded)] == [0, 1, 2]
    assert isinstance(answer[-1], events.Done)
    linked.submit(2, EmbeddingRequest(tuple("text" for _ in range(2000))))
    linked.desk.take(Cancel(2))
    cancelled = linked.answer(2)
    assert isinstance(cancelled[-1], events.Done)
    assert not any(isinstance(event, events.Finished) for event in cancelled)
    linked.submit(3, EmbeddingRequest(("a", "")))
    (error,) = linked.answer(3)
    assert isinstance(error, events.Error)
    assert (error.code, error.index) == ("invalid_request", 1)
