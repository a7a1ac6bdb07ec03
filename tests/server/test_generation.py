"""The way from request to answer, event by event: when headers go out, what errors become, who ends the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localllm.errors import (
    LocalLLMError,
    ModelNotFound,
    ModelRefused,
    NotEnoughMemory,
    Poisoned,
    Unavailable,
    WorkerDied,
)
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.stream import told
from localllm.runtime.types import Request
from localllm.server.state import Limits, ServerSettings, draining
from tests.fake_engine import FakeEngine, fake_service
from tests.server.fakes import (
    FakeStream,
    FakeSupervisor,
    FakeWorker,
    Running,
    fake_supervisor,
    serving,
    wait_until,
)

HELLO = [{"role": "user", "content": "hello"}]
QUEUED = events.Queued("r", 0)
ADMITTED = events.Admitted(5, {"device": 2}, 1, 100)
USAGE = events.Usage(5, 2, {"device": 2}, timings_ms={"queue": 1.0, "prefill": 2.0, "decode": 4.0})
DONE = events.Done()


def token(text: str, choice: int = 0) -> events.Token:
    return events.Token(choice, text, (65,))


def finished(reason: Any = "stop", choice: int = 0) -> events.Finished:
    return events.Finished(choice, reason)


class ManualWorker(FakeWorker):
    """A worker whose streams the test fills."""

    def submit(self, request: Request) -> FakeStream:
        self.requests.append(request)
        stream = FakeStream(request.request_id)
        self.streams.append(stream)
        return stream


class Manual:
    """A server of one manual worker, and what to do to its last stream."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def stream(self, n: int = 1) -> FakeStream:
        wait_until(lambda: len(self.running.worker.streams) >= n)
        return self.running.worker.streams[n - 1]

    def put(self, *batch: Event, n: int = 1) -> None:
        self.running.loop.call_soon_threadsafe(self.stream(n).put, batch)

    def ask(self, **body: Any) -> Connection:
        return Connection(self.running, {"messages": HELLO, **body})


class Connection:
    """A request on a raw socket, read as it comes."""

    def __init__(self, running: Running, body: Any, path: str = "/v1/chat/completions") -> None:
        self.sock = running.connect()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n"
        self.sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        self.received = b""

    def read_until(self, *wanted: bytes, timeout_s: float = 10) -> bytes:
        """Read until all of `wanted` were seen."""
        self.sock.settimeout(timeout_s)
        while not all(part in self.received for part in wanted):
            part = self.sock.recv(65536)
            assert part, self.received
            self.received += part
        return self.received

    def is_silent(self, for_s: float) -> bool:
        """Say whether nothing came for a while."""
        self.sock.settimeout(for_s)
        try:
            part = self.sock.recv(65536)
        except TimeoutError:
            return True
        self.received += part
        return False

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1])

    def reset(self) -> None:
        """Close as a process that dies does: with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


@contextlib.contextmanager
def manual(**limits: Any) -> Iterator[Manual]:
    supervisor = FakeSupervisor(ManualWorker("fake", fake_service()))
    with serving(supervisor, ServerSettings(limits=Limits(**limits))) as running:
        yield Manual(running)
        wait_until(lambda: running.state.n_active == 0)
        assert not running.state.cuts


def test_headers_go_out_with_the_first_token() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(QUEUED, ADMITTED, events.Progress(2, 5))
        assert client.is_silent(0.1)
        server.put(token("a"))
        received = client.read_until(b'"role":"assistant"', b'"content":"a"')
        assert b"x-localllm-cached-tokens: 2" in received
        server.put(finished(), USAGE, DONE)
        client.read_until(b"[DONE]")


@pytest.mark.parametrize("is_stream", [False, True])
def test_cached_tokens_are_told_by_the_tier_they_came_from(is_stream: bool) -> None:
    cached = {"ram": 5, "disk": 7}
    with manual() as server:
        client = server.ask(stream=is_stream, timings=True, stream_options={"include_usage": True})
        usage = events.Usage(20, 1, cached)
        server.put(events.Admitted(20, cached, 1, 8), token("a"), finished(), usage, DONE)
        received = client.read_until(b'"timeline_ms"')
    assert b"x-localllm-cached-tokens: 12" in received
    assert b"x-localllm-cached-by-tier: device=0, ram=5, disk=7" in received
    by_tier = b'"cached_tokens_by_tier":{"device":0,"ram":5,"disk":7}'
    assert b'"prompt_tokens_details":{"cached_tokens":12,' + by_tier + b"}" in received
    assert b'"cache_n":12,"prompt_n":8' in received


def test_tokens_that_came_together_leave_together() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, *(token(c) for c in "abcdef"), finished(), USAGE, DONE)
        received = client.read_until(b"[DONE]")
        assert [received.count(b'"content":"%c"' % c) for c in b"abcdef"] == [1] * 6
        assert received.partition(b"[DONE]")[0].count(b"\r\n\r\n") == 1  # the head's


def test_text_that_is_held_back_makes_no_chunk() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, token(""), token("é"), token(""), finished(), USAGE, DONE)
        received = client.read_until(b"[DONE]")
        assert received.count(b'"content"') == 2  # the role's and one


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [[], [QUEUED], [QUEUED, ADMITTED], [QUEUED, ADMITTED, events.Progress(1, 5)]])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerDied("died"), 503),
        (Poisoned("bad"), 422),
        (LocalLLMError("broken"), 500),
        (Unavailable("loading", retry_after_s=2.2, state="loading"), 503),
    ],
)
def test_an_error_before_the_first_token_is_a_plain_one(
    stream: bool, before: list[Event], error: LocalLLMError, status: int
) -> None:
    with manual() as server:
        client = server.ask(stream=stream)
        server.put(*before)
        server.put(told(error))
        received = client.read_until(b"}}")
        assert client.status == status
        assert b"application/json" in received
        assert (b"retry-after:" in received) == (status == 503)
        assert (b"x-should-retry: false" in received) == (status == 500)
        assert (b"retry-after: 3" in received) == bool(error.details)


def test_an_error_after_the_first_token_is_the_streams_last_event() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, token("a"))
        client.read_until(b'"a"')
        server.put(token("b"), told(WorkerDied("The process died.")))
        received = client.read_until(b'"code":"worker_died"', b"\r\n0\r\n\r\n")
        assert b'"b"' in received
        assert b"[DONE]" not in received
        error = json.loads(received.rpartition(b"data: ")[2].split(b"\n")[0])["error"]
        assert set(error) >= {"message", "type", "param", "code"}
    assert "error=worker_died" in server.running.log.getvalue()


def test_an_error_in_the_middle_of_a_whole_answer_is_a_plain_one() -> None:
    with manual() as server:
        client = server.ask()
        server.put(ADMITTED, token("a"), token("b"))
        server.put(told(WorkerDied("The process died.")))
        client.read_until(b"worker_died")
        assert client.status == 503


# --- silence


def test_after_long_silence_headers_go_out_at_admission_and_comments_follow() -> None:
    with manual(silence_s=0.15) as server:
        client = server.ask(stream=True)
        server.put(QUEUED)
        assert client.is_silent(0.3)  # queued: it may still be refused
        server.put(ADMITTED)
        client.read_until(b"text/event-stream", b'"role":"assistant"')
        server.put(events.Progress(2, 5))
        client.read_until(b": prefill 2/5\n\n")
        n_comments = client.received.count(b"\n: ")
        server.put(token("a"))
        client.read_until(b'"a"')
        time.sleep(0.4)
        server.put(finished(), USAGE, DONE)
        client.read_until(b"[DONE]")
        assert client.received.count(b": still at work") >= 2
        assert client.received.count(b"\n: ") > n_comments
        assert client.received.count(b'"role":"assistant"') == 1


def test_after_long_prefill_headers_go_out_and_an_error_is_an_event() -> None:
    with manual(silence_s=0.1) as server:
        client = server.ask(stream=True)
        server.put(QUEUED, ADMITTED)
        client.read_until(b"text/event-stream", b": still at work")
        server.put(told(WorkerDied("The process died.")))
        client.read_until(b"worker_died", b"\r\n0\r\n\r\n")
        assert client.status == 200


def test_no_comments_while_tokens_flow() -> None:
    with manual(silence_s=0.2) as server:
        client = server.ask(stream=True)
        server.put(ADMITTED)
        for _ in range(12):
            server.put(token("a"))
            time.sleep(0.05)
        server.put(finished(), USAGE, DONE)
        assert b"\n: " not in client.read_until(b"[DONE]")


def test_a_whole_answer_stays_silent_and_keeps_its_status() -> None:
    with manual(silence_s=0.05) as server:
        client = server.ask()
        server.put(QUEUED, ADMITTED)
        assert client.is_silent(0.3)
        server.put(token("a"), finished(), USAGE, DONE)
        client.read_until(b'"content":"a"')
        assert client.status == 200


def test_progress_is_told_on_request() -> None:
    with manual() as server:
        client = server.ask(stream=True, return_progress=True)
        server.put(QUEUED, ADMITTED, events.Progress(2, 5))
        client.read_until(b'"prompt_progress"')
        server.put(events.Progress(5, 5), token("a"), finished(), USAGE, DONE)
        received = client.read_until(b"[DONE]")
        told = [json.loads(line[6:]) for line in received.split(b"\n") if b"prompt_progress" in line]
        assert [one["prompt_progress"]["processed"] for one in told] == [2, 5]
        assert {one["prompt_progress"]["cache"] for one in told} == {2}
        assert {one["object"] for one in told} == {"chat.completion.chunk"}


# --- clients that go


def reset(client: Connection) -> None:
    client.reset()


def close(client: Connection) -> None:
    client.close()


@pytest.mark.parametrize("leave", [reset, close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "seen", [[], [QUEUED], [QUEUED, ADMITTED], [ADMITTED, events.Progress(1, 5)], [ADMITTED, token("a")]]
)
def test_a_client_that_goes_ends_the_work(leave: Callable[[Connection], None], stream: bool, seen: list[Event]) -> None:
    with manual() as server:
        client = server.ask(stream=stream)
        server.put(*seen)
        stream_of = server.stream()
        if any(isinstance(event, events.Token) for event in seen) and stream:
            client.read_until(b'"a"')
        leave(client)
        wait_until(lambda: stream_of.n_cancels == 1)
        server.put(finished("cancelled"), USAGE, DONE)
        wait_until(lambda: server.running.state.n_active == 0)
    log = server.running.log.getvalue()
    started = stream and any(isinstance(event, events.Token) for event in seen)
    assert f"code={200 if started else 499}" in log
    assert "cancelled=yes" in log


def test_a_client_that_goes_while_its_model_loads_gets_no_work_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with manual() as server:
        at_once = server.running.supervisor.worker

        async def later(name: str | None, wait_s: float = 15.0) -> FakeWorker:
            await asyncio.sleep(0.2)
            return await at_once(name, wait_s)

        monkeypatch.setattr(server.running.supervisor, "worker", later)
        server.ask().close()
        wait_until(lambda: server.stream().n_cancels == 1)
        server.put(finished("cancelled"), USAGE, DONE)
    assert "code=499" in server.running.log.getvalue()


def test_a_finished_request_is_not_cancelled() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, token("a"), finished(), USAGE, DONE)
        client.read_until(b"[DONE]")
        wait_until(lambda: server.running.state.n_active == 0)
        client.close()
        time.sleep(0.05)
        assert server.stream().n_cancels == 0


def test_connections_are_kept_for_the_next_request() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, token("a"), finished(), USAGE, DONE)
        client.read_until(b"[DONE]", b"0\r\n\r\n")
        second = json.dumps({"messages": HELLO}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:{server.running.port}\r\n"
        client.received = b""
        client.sock.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(second)}\r\n\r\n".encode() + second
        )
        server.put(ADMITTED, token("b"), finished(), USAGE, DONE, n=2)
        client.read_until(b'"content":"b"')


def test_a_request_sent_too_early_waits_and_does_not_hide_that_its_client_goes() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        data = json.dumps({"messages": HELLO}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:{server.running.port}\r\n"
        server.put(ADMITTED)
        client.sock.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        time.sleep(0.05)
        assert len(server.running.worker.streams) == 1
        client.close()
        wait_until(lambda: server.stream().n_cancels == 1)
        server.put(finished("cancelled"), USAGE, DONE)


def test_a_reader_that_takes_nothing_is_dropped_and_its_work_ended() -> None:
    with manual(stalled_s=0.5) as server:
        client = server.ask(stream=True)
        stream = server.stream()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(30):
            server.put(ADMITTED, *(token("x" * 1000) for _ in range(10)))
        wait_until(lambda: stream.n_cancels == 1, timeout_s=10)
        server.put(finished("cancelled"), USAGE, DONE)
        wait_until(lambda: server.running.state.n_active == 0)


def test_a_reader_for_whom_too_much_waits_is_dropped() -> None:
    with manual(stalled_s=60, output_bytes=100_000) as server:
        client = server.ask(stream=True)
        stream = server.stream()
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.put(ADMITTED)
        for _ in range(3000):
            server.put(token("x" * 1000))
        wait_until(lambda: stream.n_cancels == 1, timeout_s=10)
        server.put(DONE)


def test_a_slow_reader_that_takes_some_gets_all() -> None:
    with manual(stalled_s=1.2, output_bytes=10_000_000) as server:
        client = server.ask(stream=True)
        server.put(ADMITTED)
        for _ in range(500):
            server.put(token("x" * 1000))
        server.put(finished(), USAGE, DONE)
        client.sock.settimeout(10)
        received = b""
        while b"[DONE]" not in received[-100:]:
            part = client.sock.recv(20_000)
            assert part
            received += part
            time.sleep(0.02)
        assert received.count(b'"content":"x') == 500
        assert server.stream().n_cancels == 0


def test_a_large_whole_answer_to_a_slow_reader_is_no_stall() -> None:
    with manual(stalled_s=1.2) as server:
        client = server.ask()
        server.put(ADMITTED, *(token("x" * 1000) for _ in range(1000)), finished(), USAGE, DONE)
        client.sock.settimeout(10)
        n_received = 0
        while n_received < 1_000_000:
            part = client.sock.recv(10_000)
            assert part
            n_received += len(part)
            time.sleep(0.01)


# --- cut from outside


def test_a_server_that_stops_ends_streams_with_an_error_event_and_the_rest_with_503() -> None:
    with manual() as server:
        streaming, waiting, whole = server.ask(stream=True), server.ask(stream=True), server.ask()
        wait_until(lambda: len(server.running.worker.streams) == 3)
        at = {stream: n for n, stream in enumerate(server.running.worker.streams, 1)}
        for n in at.values():
            server.put(ADMITTED, n=n)
        by_stream = [request.request_id for request in server.running.worker.requests]
        assert len(by_stream) == 3
        for n in at.values():
            server.put(token("a"), n=n)
        streaming.read_until(b'"a"')

        def cut_all() -> None:
            for cut in list(server.running.state.cuts):
                cut(draining(5.0))

        server.running.loop.call_soon_threadsafe(cut_all)
        wait_until(lambda: all(stream.n_cancels == 1 for stream in server.running.worker.streams))
        for n in at.values():
            server.put(finished("cancelled"), USAGE, DONE, n=n)
        streaming.read_until(b'"code":"draining"', b"0\r\n\r\n")
        waiting.read_until(b'"code":"draining"')
        whole.read_until(b'"code":"draining"')
        assert whole.status == 503
        assert b"retry-after: 5" in whole.received


def test_an_answer_that_ended_by_itself_is_whole_although_it_was_to_be_cut() -> None:
    with manual() as server:
        client = server.ask(stream=True)
        server.put(ADMITTED, token("a"))
        client.read_until(b'"a"')
        server.running.loop.call_soon_threadsafe(
            lambda: [cut(draining(5.0)) for cut in list(server.running.state.cuts)]
        )
        server.put(finished("stop"), USAGE, DONE)
        assert b"draining" not in client.read_until(b"[DONE]")


def test_whoever_waits_for_a_model_when_the_server_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as running:

        async def never(name: str | None, wait_s: float = 15.0) -> FakeWorker:
            await asyncio.sleep(60)
            raise AssertionError

        monkeypatch.setattr(running.supervisor, "worker", never)
        client = Connection(running, {"messages": HELLO})
        wait_until(lambda: running.state.n_active == 1)
    client.read_until(b'"code":"draining"')
    assert client.status == 503
    assert running.state.n_active == 0


def test_a_model_without_a_template_cannot_chat_but_complete() -> None:
    with serving(fake_supervisor(template=None)) as running:
        for stream in (False, True):
            reply = running.post("/v1/chat/completions", {"messages": HELLO, "stream": stream})
            assert (reply.status, reply.error["code"]) == (400, "template_error")
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200


def test_no_new_work_while_draining() -> None:
    with serving() as running:
        running.state.is_draining = True
        reply = running.post("/v1/chat/completions", {"messages": HELLO})
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert int(reply.headers["retry-after"]) >= 1
        assert running.get("/livez").status == 200


# --- models


@pytest.mark.parametrize(
    ("error", "status", "retries"),
    [
        (Unavailable("loading", code="loading", retry_after_s=3, state="loading"), 503, "3"),
        (NotEnoughMemory("too large"), 503, None),
        (ModelRefused("no model"), 422, None),
        (ModelNotFound("none"), 404, None),
    ],
)
def test_a_model_that_cannot_be_had_is_told_by_status(error: LocalLLMError, status: int, retries: str | None) -> None:
    with serving() as running:
        running.supervisor.refuses["fake"] = error
        for stream in (False, True):
            reply = running.post("/v1/chat/completions", {"messages": HELLO, "stream": stream})
            assert reply.status == status
            assert reply.headers.get("retry-after") == retries
            assert reply.error["code"] == error.code


def test_a_worker_that_died_meanwhile_is_a_503() -> None:
    with serving() as running:
        running.worker.is_alive = False
        reply = running.post("/v1/completions", {"prompt": ["a", "b"]})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")


def test_more_requests_than_places_are_refused_while_probes_go_on() -> None:
    with manual(n_active=2) as server:
        first, second = server.ask(stream=True), server.ask(stream=True)
        server.stream(2)
        reply = server.running.post("/v1/chat/completions", {"messages": HELLO})
        assert (reply.status, reply.error["code"]) == (503, "too_many_requests")
        assert "retry-after" in reply.headers
        assert server.running.get("/livez").status == 200
        for n in (1, 2):
            server.put(ADMITTED, token("a"), finished(), USAGE, DONE, n=n)
        first.read_until(b"[DONE]")
        second.read_until(b"[DONE]")
        wait_until(lambda: server.running.state.n_active == 0)


def test_a_failure_of_ours_is_a_500_that_tells_nothing() -> None:
    with serving() as running:
        running.worker.model = {}  # no name: the fingerprint is made without it

        def broken(request: Request) -> FakeStream:
            raise RuntimeError("secret prompt text")

        running.worker.submit = broken  # type: ignore[method-assign]
        reply = running.post("/v1/chat/completions", {"messages": HELLO})
        assert reply.status == 500
        assert reply.headers["x-should-retry"] == "false"
        assert "secret" not in reply.body.decode()
        wait_until(lambda: running.state.n_active == 0)
    assert "RuntimeError" in running.log.getvalue()
    assert "secret" not in running.log.getvalue()


# --- cancels on a real runtime


def test_many_cancels_at_any_moment_leave_nothing_and_change_nothing() -> None:
    engine = FakeEngine(script=lambda tokens: 65 + len(tokens) % 26, on_forward=lambda batch: time.sleep(0.001))
    with serving(fake_supervisor(engine)) as running:
        service = running.worker.service
        body = {"messages": HELLO, "max_tokens": 20}
        cold = running.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        for i in range(60):
            client = Connection(running, {**body, "max_tokens": 3000, "stream": i % 2 == 0, "n": 1 + i % 3})
            time.sleep((i % 12) * 0.001)
            client.reset() if i % 2 else client.close()
        wait_until(lambda: running.state.n_active == 0)
        wait_until(lambda: service.stats().n_running == service.stats().n_waiting == 0)
        n_tokens = service.stats().n_generated_tokens
        time.sleep(0.05)
        assert service.stats().n_generated_tokens == n_tokens
        assert running.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == cold
        assert not engine.broken


def test_work_stops_within_a_step_of_the_client_going() -> None:
    engine = FakeEngine(script=lambda tokens: 65, on_forward=lambda batch: time.sleep(0.02))
    with serving(fake_supervisor(engine)) as running:
        client = Connection(running, {"messages": HELLO, "max_tokens": 3000, "stream": True})
        client.read_until(b'"content":"A"')
        n_before = len(engine.batches)
        client.close()
        wait_until(lambda: running.worker.service.stats().n_running == 0)
        assert len(engine.batches) - n_before <= 4
