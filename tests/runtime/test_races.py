"""Many threads at once: one end for every accepted request, nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.errors import LocalLLMError, QueueFull, Unavailable
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.engine import Batch
from localllm.runtime.events import Done, Error, Event, Finished
from localllm.runtime.inbox import Close, Inbox
from localllm.runtime.service import Service
from localllm.runtime.stream import TokenStream, collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import SPEC, FakeEngine, fake_service

WAIT_S = 20


def _request(n_prompt: int = 20, **options: object) -> CompletionRequest:
    return CompletionRequest((65,) * n_prompt, GenerationOptions(**{"max_tokens": 20, "ignore_eos": True, **options}))


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "somebody waits for ever"


class Gated(FakeEngine):
    """Each forward waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.in_forward = threading.Event()
        super().__init__(on_forward=self._wait)

    def _wait(self, batch: Batch) -> None:
        self.in_forward.set()
        assert self.gate.wait(WAIT_S)


def _read_async(stream: TokenStream) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in stream]

    return asyncio.run(read())


def _leave_on_a_closed_loop(stream: TokenStream) -> None:
    async def first() -> None:
        async for _ in stream:
            return

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _leave_early(stream: TokenStream, n_events: int) -> None:
    iterator = iter(stream)
    for _ in range(n_events):
        next(iterator, None)
    iterator.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_read_cancel_leave_and_close_at_random_get_one_end_each(seed: int) -> None:
    rng = random.Random(seed)
    engine = FakeEngine(
        replace(SPEC, n_slots=4, pool_tokens=300),
        on_forward=lambda batch: time.sleep(rng.random() * 0.001),
        fail_forwards={rng.randint(1, 400) for _ in range(rng.choice([0, 3]))},
    )
    service = fake_service(engine, config=RuntimeConfig(max_waiting=16))
    read = list[list[Event]]()

    def client(number: int) -> None:
        own = random.Random(seed * 100 + number)
        for _ in range(8):
            prompt = tuple(own.choices(range(60, 64), k=own.randint(1, 80)))
            options = GenerationOptions(max_tokens=own.randint(1, 30), n=own.choice([1, 1, 2]))
            try:
                stream = service.submit(CompletionRequest(prompt, options))
            except LocalLLMError:
                continue  # full, or closed
            match own.choice(["read", "cancel", "leave", "async", "closed loop"]):
                case "leave":
                    _leave_early(stream, own.randint(1, 4))
                    list(stream)
                case "closed loop":
                    _leave_on_a_closed_loop(stream)
                    list(stream)
                case "async":
                    read.append(_read_async(stream))
                case kind:
                    for _ in range(2 if kind == "cancel" else 0):
                        stream.cancel()
                    read.append(list(stream))

    threads = [_in_thread(lambda number=n: client(number)) for n in range(6)]  # type: ignore[misc]
    if seed % 2:
        time.sleep(rng.random() * 0.1)
        service.close()
    _join(threads)
    service.close()
    for told in read:
        assert sum(isinstance(e, (Done, Error)) for e in told) == 1
        assert isinstance(told[-1], (Done, Error))
    assert engine.closed
    assert engine.broken == []
    assert not service._scheduler._readers._runs
    assert service._scheduler.n_waiting == 0
    assert not service._loop._thread.is_alive()


def test_two_readers_share_a_stream_and_both_end() -> None:
    with fake_service() as service:
        stream = service.submit(_request())
        parts: list[list[Event]] = [[], []]
        _join([_in_thread(lambda part=part: part.extend(stream)) for part in parts])  # type: ignore[misc]
        assert sum(isinstance(e, Done) for part in parts for e in part) == 1


def test_two_asynchronous_readers_share_a_stream_and_both_end() -> None:
    async def read_twice(stream: TokenStream) -> list[list[Event]]:
        async def read() -> list[Event]:
            return [event async for event in stream]

        return await asyncio.wait_for(asyncio.gather(read(), read()), WAIT_S)

    with fake_service() as service:
        parts = asyncio.run(read_twice(service.submit(_request())))
    assert sum(isinstance(e, Done) for part in parts for e in part) == 1


def test_a_stream_that_was_read_is_empty_and_has_no_answer() -> None:
    with fake_service() as service:
        stream = service.submit(_request())
        assert isinstance(list(stream)[-1], Done)
        assert list(stream) == []
        assert _read_async(stream) == []
        with pytest.raises(LocalLLMError, match="read before"):
            collect(stream)


def test_a_reader_whose_event_loop_closed_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Gated()
    with fake_service(engine) as service:
        left, other = service.submit(_request()), service.submit(_request())

        async def begin() -> None:
            await anext(aiter(left))

        def closed(*args: object) -> None:
            raise RuntimeError("Event loop is closed")

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", closed)  # closed between a look and the call
            engine.gate.set()
            assert isinstance(list(other)[-1], Done)
        assert service.is_alive
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_the_same_request_submitted_twice_at_once_is_answered_twice() -> None:
    with fake_service() as service:
        request = _request()
        first, second = service.generate([request, request])
        assert first.choices == second.choices
        streams = [service.submit(_request(max_tokens=3000)) for _ in range(1)]
        twin = CompletionRequest((66,) * 20, GenerationOptions(max_tokens=20, ignore_eos=True))
        streams += [service.submit(twin), service.submit(twin)]
        streams[1].cancel()
        assert [e.reason for e in streams[2] if isinstance(e, Finished)] == ["length"]
        streams[0].cancel()


def test_cancel_before_admission_never_runs_a_row() -> None:
    engine = Gated()
    with fake_service(engine) as service:
        first = service.submit(_request())
        assert engine.in_forward.wait(WAIT_S)
        second = service.submit(CompletionRequest((66,) * 20))
        second.cancel()
        engine.gate.set()
        assert [e.reason for e in second if isinstance(e, Finished)] == ["cancelled"]
        list(first)
    assert not any(token == 66 for batch in engine.batches for item in batch.items for token in item.tokens)


def test_the_queue_limit_holds_while_a_step_takes_its_time() -> None:
    """Requests on their way to the engine's thread wait too, and a request counts once, whatever its n."""
    engine = Gated()
    with fake_service(engine, config=RuntimeConfig(max_waiting=3, max_running=1)) as service:
        streams = [service.submit(_request())]
        assert engine.in_forward.wait(WAIT_S)
        streams += [service.submit(_request(n=4)) for _ in range(3)]
        with pytest.raises(QueueFull):
            service.submit(_request())
        engine.gate.set()
        assert all(isinstance(list(s)[-1], Done) for s in streams)
        assert isinstance(list(service.submit(_request()))[-1], Done)


def test_a_refused_request_leaves_its_place_in_the_queue() -> None:
    with fake_service(config=RuntimeConfig(max_waiting=1)) as service:
        for _ in range(3):
            with pytest.raises(LocalLLMError):
                service.submit(CompletionRequest((65,) * 100_000))
        assert isinstance(list(service.submit(_request()))[-1], Done)


@pytest.mark.parametrize("max_waiting", [1, 2, 8])
def test_generate_waits_for_room_in_the_queue(max_waiting: int) -> None:
    with fake_service(config=RuntimeConfig(max_waiting=max_waiting)) as service:
        answers = service.generate([_request(5 + i, n=4) for i in range(30)])
        assert [a.usage.prompt_tokens for a in answers] == [5 + i for i in range(30)]


def test_generate_that_fails_cancels_what_it_began() -> None:
    with fake_service() as service:
        with pytest.raises(LocalLLMError):
            service.generate([_request(max_tokens=3000), CompletionRequest((65,) * 100_000)])
        deadline_s = time.monotonic() + WAIT_S
        while service.stats().n_running or service.stats().n_waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        assert service.stats().n_generated_tokens < 3000


def test_submit_to_a_model_closed_meanwhile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    service = fake_service()

    def closes(*args: object) -> None:
        service.close()
        raise ValueError("the tokenizer is gone")

    monkeypatch.setattr("localllm.runtime.service.prepare", closes)
    with pytest.raises(Unavailable):
        service.submit(_request())


class Exits(BaseException):
    """Not an Exception: what escapes every handler but the last."""


@pytest.mark.parametrize("error", [Exits, SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_escapes_a_step_ends_every_request(error: type[BaseException]) -> None:
    def explode(batch: Batch) -> None:
        raise error

    service = fake_service(FakeEngine(on_forward=explode), config=RuntimeConfig(max_running=1))
    streams = list[TokenStream]()
    for _ in range(4):
        try:
            streams.append(service.submit(_request()))
        except LocalLLMError:
            break
    last: list[object] = []
    threads = [_in_thread(lambda stream=s: last.append(list(stream)[-1])) for s in streams]  # type: ignore[misc]
    _join(threads)
    assert len(last) == len(streams) > 0
    assert all(isinstance(event, Error) for event in last)
    service.close()


def test_a_broken_ledger_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    service = fake_service(config=RuntimeConfig(max_running=1))

    def broken(*args: object) -> None:
        raise IndexError("the ledger is broken")

    monkeypatch.setattr(service._scheduler._room, "vacate", broken)
    monkeypatch.setattr(service._scheduler._room, "seat", broken)
    streams = [service.submit(_request()) for _ in range(1)]
    assert isinstance(list(streams[0])[-1], Error)
    service._loop._thread.join(WAIT_S)
    assert not service.is_alive
    service.close()


def test_an_engine_that_cannot_be_freed_leaves_nobody_waiting() -> None:
    class Stuck(Gated):
        def close(self) -> None:
            raise RuntimeError("native memory is gone")

    engine = Stuck()
    service = fake_service(engine, config=RuntimeConfig(max_running=1))
    streams = [service.submit(_request()) for _ in range(3)]
    assert engine.in_forward.wait(WAIT_S)
    closer = _in_thread(service.close)
    engine.gate.set()
    _join([closer, *[_in_thread(lambda stream=s: list(stream) and None) for s in streams]])  # type: ignore[misc]


def test_death_is_told_with_a_fresh_exception_each_time() -> None:
    service = fake_service()
    service._scheduler.plan = lambda drafts: 1 / 0  # type: ignore[assignment]
    list(service.submit(_request()))
    service._loop._thread.join(WAIT_S)
    caught = list[LocalLLMError]()
    for _ in range(2):
        with pytest.raises(LocalLLMError) as error:
            service.submit(_request())
        caught.append(error.value)
    assert caught[0] is not caught[1]
    service.close()


def test_the_log_of_a_death_quotes_no_text(caplog: pytest.LogCaptureFixture) -> None:
    service = fake_service()

    quoted = "".join(["sec", "ret"])

    def dies(drafts: object) -> None:
        raise ValueError(quoted)

    service._scheduler.plan = dies  # type: ignore[assignment]
    assert isinstance(list(service.submit(_request()))[-1], Error)
    service._loop._thread.join(WAIT_S)
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text
    service.close()


class Remembering:
    """A drafter that fails where it is told to, and counts whom it knows."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.known: set[object] = set()

    def propose(self, sequences: object, budget: int) -> list[object]:
        """Remember, draft nothing."""
        self._fail("propose")
        self.known.update(sequences)  # type: ignore[call-overload]
        return []

    def accepted(self, sequence: object, tokens: object) -> None:
        """Only fail."""
        self._fail("accepted")

    def forget(self, sequence: object) -> None:
        """Drop the sequence."""
        self._fail("forget")
        self.known.discard(sequence)

    def _fail(self, where: str) -> None:
        if where == self.fails_in:
            raise RuntimeError("the drafter died")


@pytest.mark.parametrize("verb", ["propose", "accepted", "forget"])
def test_a_drafter_that_fails_anywhere_is_switched_off(verb: str) -> None:
    with fake_service(drafter=Remembering(verb)) as service:
        for _ in range(3):
            assert isinstance(list(service.submit(_request()))[-1], Done)


def test_a_drafter_forgets_every_sequence_however_it_ended() -> None:
    drafter = Remembering()
    with fake_service(FakeEngine(fail_forwards={6}), drafter=drafter) as service:
        assert isinstance(list(service.submit(_request(max_tokens=3)))[-1], Done)
        assert isinstance(list(service.submit(_request(max_tokens=30)))[-1], Error)
        _leave_early(service.submit(_request(max_tokens=3000)), 5)
        list(service.submit(_request(max_tokens=3)))
        _check_forgotten(service, drafter)


def _check_forgotten(service: Service, drafter: Remembering) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while drafter.known:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    assert service.is_alive


EXIT = """
import sys
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import FakeEngine, fake_service
import time
service = fake_service(FakeEngine(on_forward=lambda batch: time.sleep(0.05)))
stream = service.submit(CompletionRequest((65,) * 20, GenerationOptions(max_tokens=900, ignore_eos=True)))
next(iter(stream))
service._loop.engine.close = lambda: print("freed", flush=True)
sys.exit(7)
"""


def test_a_process_that_ends_without_closing_frees_the_engine_first() -> None:
    """A daemon thread inside a forward while the process goes down crashed it (exit by SIGSEGV)."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (7, "freed"), done.stderr


def test_an_interrupted_close_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    service = fake_service()
    join = service._loop._thread.join

    def interrupted(timeout: float | None = None) -> None:
        monkeypatch.setattr(service._loop._thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(service._loop._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        service.close()
    service.close()
    assert not service._loop._thread.is_alive()


def test_messages_that_come_while_others_are_taken_wait_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def get(self, block: bool, timeout: float | None) -> Close:
            return Close()

        def get_nowait(self) -> Close:
            return Close()

        def qsize(self) -> int:
            return 2

    inbox = Inbox()
    monkeypatch.setattr(inbox, "_queue", Endless())
    assert len(inbox.receive(0)) == 3
