from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from localllm.bench.client.answers import StreamFold
from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.client import Client
from tests.bench.client.stand_in import Reply, Seen, StandIn, stand_in
from tests.bench.client.talking import CHAT, USAGE, endless, error, send, story, talk


def test_a_stream_is_read_to_its_end() -> None:
    outcome = send(story)
    assert (outcome.end, outcome.fault, outcome.text) == (End.ANSWER, "", "once upon a time")
    assert (outcome.status, outcome.is_stream, outcome.finish_reasons) == (200, True, ("length",))
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (7, 3, 2)
    assert len(outcome.token_s) == 3  # the role is no token
    assert outcome.started_s <= outcome.token_s[0] <= outcome.token_s[-1] <= outcome.ended_s


def test_pieces_have_the_times_at_which_they_were_sent() -> None:
    sent_s: list[float] = []

    async def slow(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for word in "abcd":
            await asyncio.sleep(0.02)
            sent_s.append(time.perf_counter())
            await reply.text(word)
        await reply.finish()
        await reply.end_stream()

    outcome = send(slow)
    late_s = [came - went for came, went in zip(outcome.token_s, sent_s, strict=True)]
    assert all(0 <= late < 0.01 for late in late_s)


def test_a_thought_is_a_token_but_not_the_answer() -> None:
    async def thinker(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event({"choices": [{"index": 0, "delta": {"reasoning": "hm", "reasoning_content": "hm"}}]})
        await asyncio.sleep(0.01)
        await reply.text("yes")
        await reply.finish()
        await reply.end_stream()

    outcome = send(thinker)
    assert len(outcome.token_s) == 2
    assert outcome.answer_s == outcome.token_s[1]


def test_a_whole_answer() -> None:
    async def whole(seen: Seen, reply: Reply) -> None:
        choice = {"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}
        timings = {"queue_ms": 1.5}
        await reply.json({"choices": [choice], "usage": USAGE, "timings": timings}, headers=["x-request-id: r1"])

    outcome = send(whole)
    assert (outcome.end, outcome.is_stream, outcome.text) == (End.ANSWER, False, "hello")
    assert (outcome.request_id, outcome.timings, outcome.token_s) == ("r1", {"queue_ms": 1.5}, ())


def test_text_is_kept_only_where_it_was_asked_for() -> None:
    assert send(story, Call.of("/v1/chat/completions", {})).text == ""


def test_a_refusal_tells_its_code_and_when_to_try_again() -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json(error(), "429 Too Many Requests", ["retry-after: 2"])

    outcome = send(refuse)
    assert (outcome.end, outcome.status, outcome.error_code) == (End.REFUSED, 429, "queue_full")
    assert (outcome.retry_after_s, outcome.error_message) == (2.0, "no")


def test_a_stream_that_is_never_ended_ends_with_the_apis_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.client.exchange.AFTER_DONE_S", 0.05)

    async def open_ended(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("all")
        await reply.finish()
        await reply.event("[DONE]")
        await asyncio.sleep(30)

    outcome = send(open_ended)
    assert (outcome.end, outcome.text) == (End.ANSWER, "all")
    assert outcome.ended_s - outcome.token_s[-1] < 5


@pytest.mark.parametrize("closes_with_done", [True, False])
def test_an_error_event_ends_a_stream(closes_with_done: bool) -> None:
    async def fail(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("half")
        await reply.event(error("worker_died"))
        if closes_with_done:
            await reply.end_stream()
        else:
            await reply.raw(b"0\r\n\r\n")

    outcome = send(fail)
    assert (outcome.end, outcome.error_code, outcome.text) == (End.ERROR_EVENT, "worker_died", "half")


def test_silence_times_out() -> None:
    async def silent(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(30)

    outcome = send(silent, timeout_s=0.1)
    assert (outcome.end, outcome.status) == (End.TIMED_OUT, None)


def test_nobody_there_is_an_outcome() -> None:
    async def go() -> Outcome:
        async with stand_in(story) as server:
            target = server.target()
        return await Client(target).send(CHAT)

    assert asyncio.run(go()).end is End.UNREACHABLE


@pytest.mark.parametrize("when", [{"cancel_after_events": 3}, {"cancel_after_s": 0.05}])
def test_a_cancelled_call_closes_its_connection(when: dict[str, Any]) -> None:
    gone = asyncio.Event()

    async def watched(seen: Seen, reply: Reply) -> None:
        try:
            await endless(seen, reply)
        finally:
            gone.set()

    async def work(server: StandIn) -> Outcome:
        outcome = await Client(server.target()).send(Call.of("/v1/chat/completions", {}, **when))
        await asyncio.wait_for(gone.wait(), 5)
        return outcome

    outcome = talk(watched, work)
    assert outcome.end is End.CANCELLED
    assert len(outcome.token_s) >= 3


def test_what_is_sent() -> None:
    async def work(server: StandIn) -> Seen:
        target = Target.of_url(f"http://127.0.0.1:{server.port}/v1", key="secret")
        await Client(target).send(Call.of("/v1/chat/completions", {"a": 1}, headers=(("x-request-id", "r"),)))
        return server.seen[0]

    seen = talk(story, work)
    assert seen.line == "POST /v1/chat/completions HTTP/1.1"
    assert (seen.headers["authorization"], seen.headers["x-request-id"]) == ("Bearer secret", "r")
    assert (seen.headers["content-type"], seen.fields) == ("application/json", {"a": 1})


def test_a_get_has_no_body() -> None:
    async def work(server: StandIn) -> Seen:
        await Client(server.target()).send(Call("/health", None))
        return server.seen[0]

    seen = talk(story, work)
    assert (seen.line, seen.body) == ("GET /health HTTP/1.1", b"")
    assert "content-type" not in seen.headers


def test_a_connection_closed_while_idle_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.client.client.STALE_AFTER_S", 0.0)
    n_calls = 0

    async def closes_on_second(seen: Seen, reply: Reply) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            reply.writer.close()
        else:
            await story(seen, reply)

    async def work(server: StandIn) -> list[Outcome]:
        client = Client(server.target())
        return [await client.send(CHAT), await client.send(CHAT)]

    outcomes = talk(closes_on_second, work)
    assert [outcome.end for outcome in outcomes] == [End.ANSWER, End.ANSWER]
    assert [outcome.n_sends for outcome in outcomes] == [1, 2]


def test_a_server_that_closes_after_each_stream_and_does_not_say_so_loses_nothing() -> None:
    async def closes_behind(seen: Seen, reply: Reply) -> None:
        await story(seen, reply)
        reply.writer.close()

    async def work(server: StandIn) -> tuple[list[Outcome], int]:
        client = Client(server.target())
        return [await client.send(CHAT) for _ in range(5)], server.n_connections

    outcomes, n_connections = talk(closes_behind, work)
    assert [outcome.end for outcome in outcomes] == [End.ANSWER] * 5
    assert sum(outcome.n_sends for outcome in outcomes) <= 6  # once it is known, a new one is opened each time
    assert n_connections == 5


def test_a_connection_used_again_that_closes_later_without_an_answer_is_a_loss() -> None:
    n_calls = 0

    async def closes_on_second(seen: Seen, reply: Reply) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            await asyncio.sleep(0.5)
            reply.writer.close()
        else:
            await story(seen, reply)

    async def work(server: StandIn) -> list[Outcome]:
        client = Client(server.target())
        return [await client.send(CHAT), await client.send(CHAT)]

    assert [outcome.end for outcome in talk(closes_on_second, work)] == [End.ANSWER, End.LOST]


def test_a_connection_in_use_that_closes_without_an_answer_is_a_loss() -> None:
    async def closes(seen: Seen, reply: Reply) -> None:
        reply.writer.close()

    assert send(closes).end is End.LOST


@pytest.mark.parametrize(("told", "seconds"), [("2", 2.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("inf", None)])
def test_when_to_try_again(told: str, seconds: float | None) -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json(error(), "429 Too Many Requests", [f"retry-after: {told}"])

    assert send(refuse).retry_after_s == seconds


def test_an_answer_ends_when_its_last_byte_came_not_when_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_s = 0.0
    slow = StreamFold.take

    def slowly(fold: StreamFold, arrived_s: float, event: bytes) -> None:
        time.sleep(0.02)
        slow(fold, arrived_s, event)

    monkeypatch.setattr(StreamFold, "take", slowly)

    async def noted(seen: Seen, reply: Reply) -> None:
        nonlocal sent_s
        await story(seen, reply)
        sent_s = time.perf_counter()

    assert send(noted).ended_s - sent_s < 0.05


def test_compression_that_was_not_asked_for_is_told() -> None:
    async def squeezed(seen: Seen, reply: Reply) -> None:
        assert seen.headers["accept-encoding"] == "identity"
        await reply.json({}, headers=["content-encoding: gzip"])

    outcome = send(squeezed)
    assert (outcome.end, outcome.fault) == (End.MALFORMED, "the answer is compressed, which was not asked for")


def test_a_stream_of_a_refusal_is_a_refusal() -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        body = b'data: {"error":{"message":"no","code":"busy"}}\n\n'
        head = b"HTTP/1.1 503 Busy\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
        await reply.raw(head + body)

    outcome = send(refuse)
    assert (outcome.end, outcome.status, outcome.error_code) == (End.REFUSED, 503, "busy")


def test_a_server_that_knows_no_chunks_is_read_to_the_end_of_its_connection() -> None:
    async def old(seen: Seen, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.0 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n\r\n")
        await reply.raw(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
        reply.writer.close()

    outcome = send(old)
    assert (outcome.end, outcome.text) == (End.ANSWER, "a")


def test_drafts_and_tool_calls_are_in_the_outcome() -> None:
    async def calls(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})
        await reply.finish("tool_calls")
        details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
        await reply.end_stream(usage={"completion_tokens": 9, "completion_tokens_details": details})

    outcome = send(calls)
    assert (outcome.accepted_draft_tokens, outcome.rejected_draft_tokens, outcome.tool_calls) == (5, 2, True)
    assert not send(story).tool_calls
