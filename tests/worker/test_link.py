"""The connection to a worker, over a socket pair: what comes, in whatever pieces, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from localllm.errors import LocalLLMError, TimedOut, Unavailable, UsageError, WorkerDied
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.types import CompletionRequest
from localllm.worker import protocol
from localllm.worker.event_stream import EventStream
from localllm.worker.link import MAX_UNSENT_BYTES, STOPPED, Link
from tests.worker.asynchronous import run
from tests.worker.stand_in import happened, rubbish

TOKEN = events.Token(0, "hello", (1,))
ACCEPTED = b"f" * 16


class Peer:
    """The other end, as a test wants it."""

    def __init__(self, link: Link, sock: socket.socket) -> None:
        self.link = link
        self.sock = sock
        self.n_ends = 0
        self.logs: list[tuple[str, str]] = []
        self.good: list[bool] = []
        self._reader = protocol.FrameReader()

    async def send(self, *frames: protocol.Frame) -> None:
        await self.send_bytes(b"".join(map(protocol.pack, frames)))

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def received(self) -> list[Any]:
        data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20)
        return list(self._reader.feed(data))


@asynccontextmanager
async def connected() -> AsyncIterator[Peer]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    peer: Peer

    def ended() -> None:
        peer.n_ends += 1

    link = Link(lambda level, text: peer.logs.append((level, text)), ended)
    peer = Peer(link, theirs)
    link.on_answer = peer.good.append
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    try:
        yield peer
    finally:
        theirs.close()
        link.end(Unavailable("the test is over"), STOPPED)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def all_of(stream: EventStream) -> list[Event]:
    got = []
    while batch := await stream.next_events():
        got += batch
    return got


def test_a_request_goes_out_and_its_events_come_back() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi", request_id="mine"))
            assert stream.request_id == "mine"
            (submit,) = await peer.received()
            assert protocol.request_of(submit) == CompletionRequest("hi", request_id="mine")
            await peer.send(protocol.Accepted(submit.number, ACCEPTED), happened(submit.number, TOKEN, TOKEN))
            assert await stream.next_events() == [TOKEN, TOKEN]
            await peer.send(happened(submit.number, events.Done()))
            assert await stream.next_events() == [events.Done()]
            assert await stream.next_events() == []
            assert (peer.good, peer.link.streams, peer.link.fingerprints) == ([True], {}, {})

    run(work())


def test_frames_arrive_in_any_pieces() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            for byte in protocol.pack(happened(1, TOKEN)) + protocol.pack(happened(1, events.Done())):
                await peer.send_bytes(bytes([byte]))
                await asyncio.sleep(0)
            assert await all_of(stream) == [TOKEN, events.Done()]

    run(work())


@pytest.mark.parametrize("n_bytes", range(len(protocol.pack(happened(1, TOKEN)))))
def test_an_end_at_any_byte_of_a_frame_ends_the_stream_with_an_error(n_bytes: int) -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(happened(1, TOKEN))
            await peer.send_bytes(protocol.pack(happened(1, TOKEN))[:n_bytes])
            peer.sock.close()
            got = await all_of(stream)
            assert got[0] == TOKEN
            assert isinstance(got[1], events.Error)
            assert got[1].code == "worker_died"
            assert len(got) == 2
            assert peer.n_ends == 1

    run(work())


@pytest.mark.parametrize("kind", sorted(rubbish(1)))
def test_rubbish_ends_the_link_at_once(kind: str) -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(protocol.Loaded({"name": "m"}))
            await peer.send_bytes(rubbish(1)[kind])
            (error,) = await all_of(stream)
            assert isinstance(error, events.Error)
            assert error.code == "worker_died"
            assert "it sent what" in peer.link.end_reason
            assert not peer.link.is_open
            assert peer.n_ends == 1

    run(work())


@pytest.mark.parametrize(
    "wire",
    [
        [0, "r", 5],
        [3, 0, None, [], []],
        [3, 0, "t", [], [[1]]],
        [3, 0, "t", 7, []],
        [8, 1, 2],
        ["3"],
        [None],
        [True, 1],
        [{"a": 1}],
        [4, 0, None],
    ],
)
def test_events_that_are_none_never_reach_a_reader_unnoticed_by_the_loop(wire: list[Any]) -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(protocol.Happened(0.0, [(1, [wire])]))
            await peer.send(happened(1, events.Done()))
            got = await all_of(stream)
            assert isinstance(got[-1], (events.Done, events.Error))

    run(work())


def test_what_follows_the_end_of_a_request_is_dropped() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(happened(1, TOKEN, events.Done(), TOKEN), happened(1, TOKEN), happened(77, TOKEN))
            assert await all_of(stream) == [TOKEN, events.Done()]
            assert peer.link.is_open

    run(work())


def test_cancel_is_told_once_and_not_after_the_end() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.received()
            stream.cancel()
            stream.cancel()
            assert await peer.received() == [protocol.Cancel(1)]
            await peer.send(happened(1, events.Finished(0, "cancelled"), events.Done()))
            await all_of(stream)
            stream.cancel()
            ended = peer.link.submit(CompletionRequest("hi"))
            (submit,) = await peer.received()
            assert isinstance(submit, protocol.Submit)
            await peer.send(happened(submit.number, events.Done()))
            await all_of(ended)
            ended.cancel()
            peer.link.send(protocol.Call(99, "ping"))
            assert await peer.received() == [protocol.Call(99, "ping")]

    run(work())


def test_a_reader_that_gives_up_waiting_loses_nothing() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(stream.next_events(), 0.01)
            await peer.send(happened(1, TOKEN, events.Done()))
            assert await asyncio.wait_for(stream.next_events(), 5) == [TOKEN, events.Done()]

    run(work())


def test_what_nobody_took_is_counted_until_it_is_taken() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            big = events.Embedded(0, b"x" * 100_000)
            await peer.send(happened(1, big, events.Token(0, "y" * 1000, ())))
            while stream.held_bytes == 0:
                await asyncio.sleep(0.001)
            assert 101_000 < stream.held_bytes < 110_000
            await stream.next_events()
            assert stream.held_bytes == 0
            assert stream.ipc_ms > 0

    run(work())


def test_time_between_the_processes_is_added_up() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            wire = protocol.event_to_wire(TOKEN)
            for _ in range(2):
                await peer.send(protocol.Happened(time.monotonic() - 0.5, [(1, [wire])]))
                await stream.next_events()
            assert 1000 <= stream.ipc_ms < 2000
            await peer.send(protocol.Happened(time.monotonic() + 1e6, [(1, [wire])]))
            await stream.next_events()
            assert stream.ipc_ms < 2000

    run(work())


def test_calls_return_raise_and_time_out() -> None:
    async def work() -> None:
        async with connected() as peer:

            async def answer() -> None:
                (call,) = await peer.received()
                assert (call.verb, call.argument) == ("add", [1, 2])
                await peer.send(protocol.Result(call.number, 3))
                (call,) = await peer.received()
                await peer.send(protocol.Failed(call.number, "invalid_request", "no", "yes", {"field": "x"}))
                (late,) = await peer.received()
                await asyncio.sleep(0.05)
                await peer.send(protocol.Result(late.number, "late"), protocol.Result(12345, "unasked"))

            answering = asyncio.create_task(answer())
            assert await peer.link.call("add", [1, 2], 5) == 3
            with pytest.raises(UsageError, match="no") as caught:
                await peer.link.call("fail", None, 5)
            assert (caught.value.hint, caught.value.details) == ("yes", {"field": "x"})
            with pytest.raises(TimedOut):
                await peer.link.call("sleep", None, 0.01)
            await answering
            await asyncio.sleep(0.01)
            assert peer.link.n_calls == 0
            assert peer.link.is_open

    run(work())


def test_calls_end_with_the_worker() -> None:
    async def work() -> None:
        async with connected() as peer:
            calls = [asyncio.create_task(peer.link.call("ping", None, 30)) for _ in range(2)]
            await peer.received()
            peer.sock.close()
            assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [WorkerDied] * 2
            with pytest.raises(Unavailable):
                await peer.link.call("ping", None, 30)
            with pytest.raises(Unavailable) as caught:
                peer.link.submit(CompletionRequest("hi"))
            assert caught.value.details["retry_after_s"] == 1

    run(work())


def test_a_request_that_no_frame_can_hold_is_refused_and_harms_no_one() -> None:
    async def work() -> None:
        async with connected() as peer:
            for prompt in ("x" * (65 << 20), "\ud800", 10**30):
                request = CompletionRequest(prompt if isinstance(prompt, str) else (prompt,))
                (error,) = await all_of(peer.link.submit(request))
                assert isinstance(error, events.Error)
                assert error.code == "invalid_request"
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(happened(stream.number, events.Done()))
            assert await all_of(stream) == [events.Done()]

    run(work())


def test_a_worker_that_does_not_read_gets_no_more_than_so_much() -> None:
    async def work() -> None:
        async with connected() as peer:
            request = CompletionRequest("x" * (16 << 20))
            for _ in range(MAX_UNSENT_BYTES // (16 << 20) + 1):
                peer.link.submit(request)
            with pytest.raises(Unavailable, match="takes no more"):
                peer.link.submit(request)
            streams = list(peer.link.streams.values())
            peer.sock.close()
            assert {(await all_of(stream))[-1].code for stream in streams} == {"worker_died"}  # type: ignore[union-attr]

    run(work())


def test_the_model_or_the_error_of_loading_it_is_kept() -> None:
    async def work() -> None:
        async with connected() as peer:
            await peer.send(protocol.Failed(0, "not_enough_memory", "too big", "smaller", {"n": 1}))
            with pytest.raises(LocalLLMError, match="too big") as caught:
                await peer.link.loaded
            assert (caught.value.code, caught.value.details) == ("not_enough_memory", {"n": 1})

    run(work())


def test_a_failure_of_a_request_is_its_error_event() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(protocol.Failed(1, "queue_full", "full", "later", {"n": 1}))
            assert await all_of(stream) == [events.Error("queue_full", "full", "later", None, {"n": 1})]
            assert peer.good == [False]

    run(work())


def test_a_cancelled_preparation_is_no_good_answer() -> None:
    async def work() -> None:
        async with connected() as peer:
            stream = peer.link.submit(CompletionRequest("hi"))
            await peer.send(happened(1, events.Finished(0, "cancelled"), events.Done()))
            await all_of(stream)
            assert peer.good == [False]

    run(work())


def test_engine_frames_are_told_from_those_of_other_threads() -> None:
    async def work() -> None:
        async with connected() as peer:
            streams = [peer.link.submit(CompletionRequest("hi")) for _ in range(2)]
            await peer.send(protocol.Accepted(1, ACCEPTED), protocol.Accepted(55, ACCEPTED))
            await peer.send(happened(1, TOKEN), happened(2, events.Error("x", "refused")))
            await streams[0].next_events()
            await all_of(streams[1])
            assert (peer.link.n_frames, peer.link.n_engine_frames) == (4, 1)
            assert peer.link.fingerprints == {1: ACCEPTED}

    run(work())


def test_fingerprints_outlast_the_worker() -> None:
    async def work() -> None:
        async with connected() as peer:
            peer.link.submit(CompletionRequest("hi"))
            await peer.send(protocol.Accepted(1, ACCEPTED))
            peer.sock.close()
            while peer.link.is_open:
                await asyncio.sleep(0.001)
            assert peer.link.fingerprints == {1: ACCEPTED}

    run(work())


def test_log_lines_come_cleaned_and_not_without_end() -> None:
    async def work() -> None:
        async with connected() as peer:
            lines = [protocol.Log("info", f"line {i}\x1b[31m\n") for i in range(1000)]
            await peer.send(*lines, protocol.Result(1))
            while peer.link.n_frames < 1001:
                await asyncio.sleep(0.001)
            assert peer.logs[0] == ("info", "line 0 [31m ")
            assert 50 <= len(peer.logs) < 100

    run(work())


def test_an_end_before_the_connection_stands_closes_it() -> None:
    async def work() -> None:
        ours, theirs = socket.socketpair()
        link = Link(lambda *_: None, lambda: None)
        link.end(Unavailable("no"), STOPPED)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        await asyncio.sleep(0.01)
        assert theirs.recv(1) == b""
        theirs.close()

    run(work())
