"""What a streamed token costs the HTTP process in CPU time: the loop's thread, from event to socket."""

from __future__ import annotations

import time

import pytest

from localllm.runtime import events
from tests.fake_engine import fake_service
from tests.server.fakes import FakeSupervisor, Running, serving, wait_until
from tests.server.test_generation import ADMITTED, DONE, USAGE, Connection, ManualWorker, finished

N_STEPS = 250


def spent_s(running: Running) -> float:
    async def read() -> float:
        return time.thread_time()

    return float(running.run(read()))


@pytest.mark.parametrize(("n_streams", "limit_ms"), [(1, 0.5), (8, 0.2)])
def test_a_streamed_token_is_cheap(n_streams: int, limit_ms: float) -> None:
    with serving(FakeSupervisor(ManualWorker("fake", fake_service()))) as running:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        clients = [Connection(running, body) for _ in range(n_streams)]
        wait_until(lambda: len(running.worker.streams) == n_streams)
        streams = running.worker.streams

        def step() -> None:
            for stream in streams:
                stream.put([events.Token(0, " word", (65,))])

        for stream in streams:
            running.loop.call_soon_threadsafe(stream.put, [ADMITTED, events.Token(0, "first", (65,))])
        for client in clients:
            client.read_until(b"first")
        before_s = spent_s(running)
        for _ in range(N_STEPS):
            running.loop.call_soon_threadsafe(step)
            time.sleep(0.002)
        per_token_ms = (spent_s(running) - before_s) / (N_STEPS * n_streams) * 1000
        for stream in streams:
            running.loop.call_soon_threadsafe(stream.put, [finished(), USAGE, DONE])
        for client in clients:
            assert client.read_until(b"[DONE]").count(b" word") == N_STEPS
            client.close()
        assert per_token_ms <= limit_ms
