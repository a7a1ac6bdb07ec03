"""What a process that owns an engine sees and decides, through the service."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from localllm.errors import ContextOverflow, Poisoned, QueueFull, Unavailable
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.engine import Batch, Engine
from localllm.runtime.events import Admitted, Done, Embedded, Error, Event, Finished
from localllm.runtime.hooks import Hooks
from localllm.runtime.sequence import RequestRun
from localllm.runtime.stream import collect
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationOptions
from tests.fake_engine import BOS, FakeEngine, fake_service

TIMEOUT_S = 10.0


class Sink:
    """Keeps a request's events, and says when the last one has come."""

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id
        self.events: list[Event] = []
        self.ended = threading.Event()

    def put(self, batch: Iterable[Event]) -> None:
        """Keep what happened in a step."""
        self.events.extend(batch)
        if isinstance(self.events[-1], (Done, Error)):
            self.ended.set()

    def wait(self) -> list[Event]:
        """Return all events, once there are no more."""
        assert self.ended.wait(TIMEOUT_S)
        return self.events


class Board:
    """Notes what the engine's thread says of its steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[tuple[str, ...], float | None]] = []
        self.n_ended = 0

    def began(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> None:
        """Note the requests of the step."""
        self.steps.append((tuple(run.request_id for run in runs), expected_s))

    def ended(self) -> None:
        """Note its end."""
        self.n_ended += 1


def _prompt(letter: int = 65, request_id: str = "r", **options: Any) -> CompletionRequest:
    return CompletionRequest((letter,) * 20, GenerationOptions(**{"max_tokens": 5, **options}), request_id=request_id)


def test_events_go_to_the_sink_of_the_caller() -> None:
    with fake_service() as service:
        sink = Sink()
        assert service.submit(_prompt(ignore_eos=True), sink) is None
        answer = collect(iter(sink.wait()))
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].ids == collect(service.submit(_prompt(ignore_eos=True))).choices[0].ids


def test_a_cancelled_sink_still_ends() -> None:
    with fake_service() as service:
        sink = Sink()
        service.submit(_prompt(ignore_eos=True, max_tokens=3000), sink)
        service.cancel(sink)
        events = sink.wait()
        assert isinstance(events[-1], Done)
        assert any(isinstance(e, Finished) and e.reason == "cancelled" for e in events)
        service.cancel(sink)
        service.cancel(Sink())


def test_a_cancel_while_the_request_is_prepared_is_not_lost() -> None:
    preparing, cancelled = threading.Event(), threading.Event()

    def gate(run: RequestRun) -> None:
        preparing.set()
        assert cancelled.wait(TIMEOUT_S)

    engine = FakeEngine()
    with fake_service(engine, hooks=Hooks(gate=gate)) as service:
        sink = Sink()
        thread = threading.Thread(target=service.submit, args=(_prompt(ignore_eos=True, max_tokens=3000), sink))
        thread.start()
        assert preparing.wait(TIMEOUT_S)
        service.cancel(sink)
        cancelled.set()
        thread.join(TIMEOUT_S)
        events = sink.wait()
    assert any(isinstance(e, Finished) and e.reason == "cancelled" for e in events)
    assert len(engine.computed) < 200
    assert not service._preparing


def test_the_gate_sees_what_was_prepared_and_may_refuse_it() -> None:
    seen: list[RequestRun] = []

    def gate(run: RequestRun) -> None:
        seen.append(run)
        if run.request_id == "bad":
            raise Poisoned("not again", "change it")

    with fake_service(hooks=Hooks(gate=gate), config=RuntimeConfig(max_waiting=2)) as service:
        for _ in range(5):  # a refused one leaves the queue
            with pytest.raises(Poisoned):
                service.submit(_prompt(request_id="bad"))
        collect(service.submit(_prompt()))
        list(service.submit(EmbeddingRequest(("hi", (65, 66)))))
        assert service.stats().n_steps > 0
    assert seen[-2].inputs == ([65] * 20,)
    assert seen[-1].inputs == ([BOS, *b"hi"], [65, 66])


def test_the_gate_is_not_asked_about_what_is_refused_anyway() -> None:
    def gate(run: RequestRun) -> None:
        raise AssertionError

    with fake_service(hooks=Hooks(gate=gate)) as service, pytest.raises(ContextOverflow):
        service.submit(CompletionRequest((65,) * 5000))


def test_the_watch_is_told_of_every_step_and_of_its_end() -> None:
    board = Board()
    with fake_service(hooks=Hooks(watch=board)) as service:
        collect(service.submit(_prompt(request_id="chat", ignore_eos=True)))
        list(service.submit(EmbeddingRequest(("x" * 100,), request_id="texts")))
        list(service.submit(_prompt(request_id="again")))
    names = [names for names, _ in board.steps if names]
    assert names[0] == ("chat",)
    assert names.count(("chat",)) >= 5
    assert names.count(("texts",)) == 2
    assert board.n_ended == len(board.steps)
    assert next(s for names, s in board.steps if names == ("again",)) is not None


def test_the_watch_is_told_of_the_end_of_a_step_that_fails() -> None:
    board = Board()
    with fake_service(FakeEngine(fail_forwards={1}, fail_embeds={1}), hooks=Hooks(watch=board)) as service:
        assert isinstance(list(service.submit(_prompt()))[-1], Error)
        assert isinstance(list(service.submit(EmbeddingRequest(("a",))))[-1], Error)
        list(service.submit(_prompt()))
    assert board.n_ended == len(board.steps)


def test_published_comes_after_all_events_of_a_step_and_never_for_nothing() -> None:
    sinks = [Sink(f"r{i}") for i in range(4)]
    heard: list[list[int]] = []

    def published() -> None:
        assert threading.current_thread().name == "localllm-engine"
        heard.append([len(sink.events) for sink in sinks])

    with fake_service(hooks=Hooks(published=published)) as service:
        for i, sink in enumerate(sinks):
            service.submit(_prompt(65 + i, sink.request_id, ignore_eos=True, max_tokens=30), sink)
        for sink in sinks:
            sink.wait()
        n_steps = service.stats().n_steps
    totals = [sum(counts) for counts in heard]
    assert all(later > earlier for earlier, later in itertools.pairwise(totals))
    assert totals[-1] == sum(len(sink.events) for sink in sinks)
    assert len(heard) <= n_steps + 2 * len(sinks)  # queueing and admission are told at once


@pytest.mark.parametrize("how", ["closed", "dead"])
def test_published_also_tells_of_the_end_of_everything(how: str) -> None:
    heard = list[int]()
    sink = Sink()
    boom: Callable[[Batch], None] = (lambda batch: _die()) if how == "dead" else (lambda batch: None)
    hooks = Hooks(published=lambda: heard.append(len(sink.events)))
    service = fake_service(FakeEngine(on_forward=boom), hooks=hooks)
    service.submit(_prompt(ignore_eos=True, max_tokens=3000), sink)
    if how == "closed":
        service.close()
    events = sink.wait()
    service.close()
    assert isinstance(events[-1], Error)
    assert heard[-1] == len(events)


def _die() -> None:
    raise SystemExit  # nothing of a step's own: the loop dies of it


def test_a_ping_is_answered_by_the_engines_thread_between_steps() -> None:
    names, answered = list[str](), threading.Event()

    def pong() -> None:
        names.append(threading.current_thread().name)
        answered.set()

    with fake_service() as service:
        service.ping(pong)
        assert answered.wait(TIMEOUT_S)
    assert names == ["localllm-engine"]
    with pytest.raises(Unavailable):
        service.ping(pong)


def test_a_ping_waits_for_the_step_at_work_and_no_longer() -> None:
    inside, go, answered = threading.Event(), threading.Event(), threading.Event()

    def on_forward(batch: Batch) -> None:
        inside.set()
        assert go.wait(TIMEOUT_S)

    with fake_service(FakeEngine(on_forward=on_forward)) as service:
        service.submit(_prompt(ignore_eos=True, max_tokens=3000), Sink())
        assert inside.wait(TIMEOUT_S)
        service.ping(answered.set)
        assert not answered.wait(0.05)
        go.set()
        assert answered.wait(TIMEOUT_S)


def test_the_engine_that_is_used_is_the_wrapped_one() -> None:
    wrapped = list[Engine]()

    def wrap(engine: Engine) -> Engine:
        wrapped.append(engine)
        return FakeEngine(script=lambda tokens: 88)

    with fake_service(hooks=Hooks(wrap_engine=wrap)) as service:
        assert collect(service.submit(_prompt())).text == "XXXXX"
    assert len(wrapped) == 1


def test_a_lone_request_runs_alone_in_the_service() -> None:
    board = Board()

    def gate(run: RequestRun) -> None:
        run.is_lone = run.request_id == "lone"

    with fake_service(hooks=Hooks(gate=gate, watch=board)) as service:
        sinks = [Sink(name) for name in ("a", "b", "lone", "c", "d")]
        for i, sink in enumerate(sinks):
            service.submit(_prompt(65 + i, sink.request_id, ignore_eos=True, max_tokens=40), sink)
        for sink in sinks:
            assert isinstance(sink.wait()[-1], Done)
    assert {names for names, _ in board.steps if "lone" in names} == {("lone",)}


def test_texts_count_in_the_queue_and_are_refused_when_it_is_full() -> None:
    go = threading.Event()
    engine = FakeEngine(on_forward=lambda batch: go.wait(TIMEOUT_S) and None)
    with fake_service(engine, config=RuntimeConfig(max_waiting=2, max_running=1)) as service:
        sinks = list[Sink]()
        with contextlib.suppress(QueueFull):
            for i in range(20):
                sinks.append(Sink(f"r{i}"))
                service.submit(EmbeddingRequest(("a", "b")), sinks[-1])
        refused = sinks.pop()
        assert 2 <= len(sinks) <= 3
        go.set()
        for sink in sinks:
            assert sum(isinstance(e, Embedded) for e in sink.wait()) == 2
        assert refused.events == []


def test_the_parts_of_a_workers_fake_engine_make_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.runtime.service import Service
    from localllm.worker.protocol import Load
    from tests.fake_engine import parts

    monkeypatch.setenv("FAKE_NO_EOS", "1")
    model, facts, engine = parts(Load("some.gguf", "some", {}, {}, b"k"))
    with Service(model, facts, engine) as service:
        request = ChatRequest(({"role": "user", "content": "hi"},), GenerationOptions(max_tokens=300))
        answer = collect(service.submit(request))
        assert answer.choices[0].finish_reason == "length"
        assert service.model.name == "some"
    assert not engine.batches


def test_admission_is_told_before_the_prefill_runs() -> None:
    sink = Sink("r")
    told: list[bool] = []
    engine = FakeEngine(on_forward=lambda batch: told.append(any(isinstance(e, Admitted) for e in sink.events)))
    with fake_service(engine) as service:
        service.submit(_prompt(65, sink.request_id, max_tokens=2), sink)
        sink.wait()
    assert told[0]
