from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.load import closed_loop
from localllm.bench.client.measure import Tally, distribution, itl_ms, summarise, tpot_ms, ttft_ms
from tests.bench.client.stand_in import Reply, Seen, stand_in


def outcome(end: End = End.ANSWER, **fields: Any) -> Outcome:
    known: dict[str, Any] = {
        "label": "",
        "client": 0,
        "is_stream": True,
        "status": 200,
        "due_s": 10.0,
        "started_s": 10.25,
        "head_s": 10.3,
        "ended_s": 12.0,
    }
    return Outcome(end=end, **(known | fields))


def test_latencies_count_from_when_a_request_was_due() -> None:
    found = outcome(token_s=(10.5, 10.75, 11.5), completion_tokens=4)
    assert ttft_ms(found) == pytest.approx(500)
    assert itl_ms(found) == pytest.approx([250, 750])
    assert tpot_ms(found) == pytest.approx(1000 / 3)  # by the server's count


def test_pieces_that_came_together_are_one() -> None:
    assert itl_ms(outcome(token_s=(10.5, 10.5, 11.0))) == pytest.approx([500])


def test_one_token_has_no_pace() -> None:
    assert tpot_ms(outcome(token_s=(10.5,))) is None
    assert ttft_ms(outcome()) is None


def test_a_distribution_is_numpys() -> None:
    samples = [float(x) for x in np.random.default_rng(1).exponential(50, 137)]
    found = distribution(samples)
    assert found is not None
    assert (found.n, found.min, found.max) == (137, min(samples), max(samples))
    assert found.p95 == pytest.approx(np.percentile(samples, 95))
    assert found.stdev == pytest.approx(np.std(samples, ddof=1))
    assert distribution([]) is None


def test_ends_and_errors_are_counted_by_kind() -> None:
    found = summarise(
        [
            outcome(token_s=(10.5, 11.0), completion_tokens=2, prompt_tokens=5, cached_tokens=1),
            outcome(End.REFUSED, status=429, error_code="queue_full"),
            outcome(End.REFUSED, status=500),
            outcome(End.ERROR_EVENT, error_code="worker_died", token_s=(10.5,)),
            outcome(End.LOST, fault="cut", ended_s=14.0),
            outcome(End.CANCELLED),
        ]
    )
    assert found.n_by_end == {"answer": 1, "refused": 2, "error_event": 1, "lost": 1, "cancelled": 1}
    assert found.n_by_error == {"queue_full": 1, "status 500": 1, "worker_died": 1}
    assert found.faults == {"cut": 1}
    assert (found.duration_s, found.completion_tokens, found.prompt_tokens, found.cached_tokens) == (4.0, 3, 5, 1)
    assert found.output_tokens_per_s == pytest.approx(0.75)
    assert found.ttft_ms is not None
    assert found.ttft_ms.n == 1  # only answers are measured


def test_nothing_measured_is_nothing() -> None:
    found = Tally().summary()
    assert (found.n_requests, found.duration_s, found.output_tokens_per_s, found.ttft_ms) == (0, 0.0, 0.0, None)


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
    for measured, truth_ms in ((found.ttft_ms, 80), (found.itl_ms, 20), (found.tpot_ms, 20), (found.e2e_ms, 200)):
        assert measured is not None
        assert truth_ms - 1 <= measured.p50 <= truth_ms * 1.25 + 3
