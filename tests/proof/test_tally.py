from __future__ import annotations

import asyncio

import pytest

from localllm.bench.client.calls import Call, End
from localllm.bench.client.load import closed_loop
from proof.tally import Tally
from tests.bench.client.made_up import outcome
from tests.bench.client.stand_in import Reply, Seen, stand_in


def test_ends_and_errors_are_counted_by_kind() -> None:
    tally = Tally()
    for one in (
        outcome(token_s=(10.5, 11.0), completion_tokens=2, prompt_tokens=5, cached_tokens=1),
        outcome(End.REFUSED, status=429, error_code="queue_full"),
        outcome(End.REFUSED, status=500),
        outcome(End.ERROR_EVENT, error_code="worker_died", token_s=(10.5,)),
        outcome(End.LOST, fault="cut", ended_s=14.0),
        outcome(End.CANCELLED),
    ):
        tally.add(one)
    found = tally.summary()
    assert found.n_by_end == {"answer": 1, "refused": 2, "error_event": 1, "lost": 1, "cancelled": 1}
    assert found.n_by_error == {"queue_full": 1, "status 500": 1, "worker_died": 1}
    assert found.faults == {"cut": 1}
    assert (found.duration_s, found.completion_tokens, found.prompt_tokens, found.cached_tokens) == (4.0, 3, 5, 1)
    assert found.output_tokens_per_s == pytest.approx(0.75)
    assert found.latencies["ttft"].n == 1  # only answers are measured
    assert "queue" not in found.latencies


def test_nothing_measured_is_nothing() -> None:
    found = Tally().summary()
    assert (found.n_requests, found.duration_s, found.output_tokens_per_s, found.latencies) == (0, 0.0, 0.0, {})


def test_figures_are_those_of_a_server_with_known_delays() -> None:
    async def scripted(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(0.08)
        await reply.begin_stream()
        for word in "abcdef":
            await reply.text(word)
            await asyncio.sleep(0.02)
        await reply.finish()
        await reply.end_stream(usage={"prompt_tokens": 3, "completion_tokens": 6})

    tally = Tally()

    async def run() -> None:
        call = Call.of("/v1/chat/completions", {"stream": True})
        async with stand_in(scripted) as server:
            await closed_loop(server.target(), [[call] * 3] * 4, tally.add)

    asyncio.run(run())
    found = tally.summary()
    assert found.n_by_end == {"answer": 12}
    assert found.completion_tokens == 72
    # The stand-in sleeps at least that long; a busy machine adds some, never takes any away.
    for name, truth_ms in (("ttft", 80), ("itl", 20), ("tpot", 20), ("e2e", 200)):
        assert truth_ms - 1 <= found.latencies[name].p50 <= truth_ms * 1.25 + 3
