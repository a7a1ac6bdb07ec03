"""Liveness: every accepted request gets exactly one terminal event, whatever fails."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from localllm.errors import EngineError, LocalLLMError, Unavailable
from localllm.runtime.engine import Batch
from localllm.runtime.events import Done, Error, Event, Finished, Usage
from localllm.runtime.stream import TokenStream, collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import SPEC, FakeEngine, fake_service
from tests.runtime.harness import SPECS, Bench, truth


def _request(letter: int = 65, n_prompt: int = 20, **options: object) -> CompletionRequest:
    return CompletionRequest(
        (letter,) * n_prompt, GenerationOptions(**{"max_tokens": 20, "ignore_eos": True, **options})
    )


def _read(stream: TokenStream) -> list[Event]:
    events = list(stream)
    assert sum(isinstance(e, (Done, Error)) for e in events) == 1
    assert isinstance(events[-1], (Done, Error))
    return events


@pytest.mark.parametrize("kind", SPECS)
def test_a_step_that_fails_fails_the_requests_in_it_and_no_other(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind], fail_forwards={4}))
    first = bench.submit([65] * 30)
    for _ in range(4):
        bench.step()
    later = bench.submit([65] * 30)
    bench.run()
    assert isinstance(_read(first)[-1], Error)
    assert collect(later).choices[0].ids == truth([65] * 30)


def test_an_unexpected_exception_in_a_step_is_an_error_event_not_a_hang() -> None:
    def explode(batch: Batch) -> None:
        if batch.items[0].tokens[0] == 66:
            raise ZeroDivisionError

    with fake_service(FakeEngine(on_forward=explode)) as service:
        bad, good = service.submit(_request(66)), service.submit(_request(65))
        error = _read(bad)[-1]
        assert isinstance(error, Error)
        assert "ZeroDivisionError" in error.message
        good_end = _read(good)[-1]
        assert isinstance(good_end, (Done, Error))
        assert isinstance(_read(service.submit(_request(67)))[-1], Done)


def test_a_dead_loop_fails_all_and_says_so() -> None:
    class Broken(FakeEngine):
        def edit(self, edits: object) -> list[object]:  # type: ignore[override]
            raise SystemError("native state lost")

    service = fake_service(Broken())
    service._scheduler.plan = lambda drafts: 1 / 0  # type: ignore[assignment]
    stream = service.submit(_request())
    assert isinstance(_read(stream)[-1], Error)
    service._loop._thread.join(5)
    assert not service.is_alive
    with pytest.raises(LocalLLMError):
        service.submit(_request())
    service.close()


def test_closing_ends_requests_at_work_with_an_error() -> None:
    gate = threading.Event()
    engine = FakeEngine(on_forward=lambda batch: gate.wait(5) and None)
    service = fake_service(engine)
    streams = [service.submit(_request(65 + i)) for i in range(3)]
    closer = threading.Thread(target=service.close)
    closer.start()
    gate.set()
    closer.join(5)
    assert not closer.is_alive()
    assert engine.closed
    for stream in streams:
        assert isinstance(_read(stream)[-1], (Error, Done))
    with pytest.raises(Unavailable):
        service.submit(_request())


def test_cancel_ends_within_one_step_in_every_phase() -> None:
    for steps_before in range(12):
        bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=32)))
        stream = bench.submit([65] * 150, max_tokens=500, ignore_eos=True, n=2)
        for _ in range(steps_before):
            bench.step()
        n_batches = len(bench.engine.batches)
        stream.cancel()
        bench.step()
        assert bench.scheduler.is_idle
        assert len(bench.engine.batches) <= n_batches
        events = _read(stream)
        assert [e.reason for e in events if isinstance(e, Finished)] == ["cancelled", "cancelled"]
        assert any(isinstance(e, Usage) for e in events)


def test_cancelled_prefix_is_found_again() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=32)))
    stream = bench.submit([65] * 150)
    for _ in range(3):
        bench.step()
    stream.cancel()
    bench.step()
    again = bench.answer([65] * 150)
    assert again.usage.cached_tokens["device"] >= 64
    assert again.choices[0].ids == truth([65] * 150)


def test_leaving_the_iteration_early_stops_the_work() -> None:
    with fake_service() as service:
        stream = service.submit(_request(max_tokens=2000))
        iterator = iter(stream)
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
        deadline_s = time.monotonic() + 5
        while service.stats().n_running or service.stats().n_waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert service.stats().n_generated_tokens < 2000


def test_an_idle_loop_sleeps() -> None:
    with fake_service() as service:
        collect(service.submit(_request()))
        time.sleep(0.05)
        n_steps_before = service.stats().n_steps
        cpu_before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - cpu_before_s < 0.1
        assert service.stats().n_steps == n_steps_before


def test_a_failing_drafter_is_switched_off_and_the_request_goes_on() -> None:
    class Failing:
        def propose(self, sequences: object, budget: int) -> list[object]:
            raise RuntimeError("draft engine died")

        def accepted(self, sequence: object, tokens: object) -> None: ...

        def forget(self, sequence: object) -> None: ...

    bench = Bench(drafter=Failing())  # type: ignore[arg-type]
    assert bench.answer([65] * 30).choices[0].ids == truth([65] * 30)


def test_bad_logits_fail_only_their_own_request() -> None:
    class Nan(FakeEngine):
        def _logits(self, tokens: object) -> object:  # type: ignore[override]
            row = super()._logits(tokens)  # type: ignore[arg-type]
            if tokens[0] == 66:  # type: ignore[index]
                row[:] = float("nan")
            return row

    bench = Bench(Nan())
    bad, good = bench.submit([66] * 10), bench.submit([65] * 10)
    bench.run()
    with pytest.raises(EngineError):
        collect(bad)
    assert collect(good).choices[0].ids == truth([65] * 10)
