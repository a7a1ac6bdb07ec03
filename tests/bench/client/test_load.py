from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from localllm.bench.client.answers import StreamFold
from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.client import Client
from localllm.bench.client.load import closed_loop, open_loop
from localllm.errors import UsageError
from tests.bench.client.stand_in import Reply, Script, Seen, StandIn, stand_in

CHAT = Call.of("/v1/chat/completions", {"messages": [], "stream": True}, keep_text=True)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def talk(script: Script, work: Callable[[StandIn], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with stand_in(script) as server:
            return await work(server)

    return asyncio.run(run())


def send(script: Script, call: Call = CHAT, **settings: Any) -> Outcome:
    async def work(server: StandIn) -> Outcome:
        client = Client(server.target(**settings))
        try:
            return await client.send(call)
        finally:
            client.close()

    outcome: Outcome = talk(script, work)
    return outcome


async def story(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    await reply.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for word in ("once", " upon", " a time"):
        await reply.text(word)
    await reply.finish("length")
    await reply.end_stream(usage=USAGE)


def test_a_stream_is_read_to_its_end() -> None:
    outcome = send(story)
    assert (outcome.end, outcome.fault, outcome.text) == (End.ANSWER, "", "once upon a time")
    assert (outcome.status, outcome.is_stream, outcome.finish_reasons) == (200, True, ("length",))
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (7, 3, 2)
    assert len(outcome.token_s) == 3  # the role is no token
    assert outcome.started_s <= outcome.head_s <= outcome.token_s[0] <= outcome.token_s[-1] <= outcome.ended_s


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


def error(code: str | None = "queue_full") -> dict[str, Any]:
    return {"error": {"message": "no", "type": "x", "param": None, "code": code}}


def test_a_refusal_tells_its_code_and_when_to_try_again() -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json(error(), "429 Too Many Requests", ["retry-after: 2"])

    outcome = send(refuse)
    assert (outcome.end, outcome.status, outcome.error_code) == (End.REFUSED, 429, "queue_full")
    assert (outcome.retry_after_s, outcome.error_message) == (2.0, "no")


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


async def no_end(reply: Reply) -> None:
    await reply.text("a")
    await reply.raw(b"0\r\n\r\n")


async def cut_event(reply: Reply) -> None:
    await reply.chunk(b'data: {"choices"')
    await reply.raw(b"0\r\n\r\n")


async def cut_body(reply: Reply) -> None:
    await reply.text("a")
    reply.writer.close()


async def no_finish(reply: Reply) -> None:
    await reply.text("a")
    await reply.end_stream()


async def two_ends(reply: Reply) -> None:
    await reply.finish()
    await reply.event("[DONE]")
    await reply.end_stream()


async def two_errors(reply: Reply) -> None:
    await reply.event(error())
    await reply.event(error())
    await reply.raw(b"0\r\n\r\n")


async def error_after_the_end(reply: Reply) -> None:
    await reply.finish()
    await reply.event("[DONE]")
    await reply.event(error())
    await reply.raw(b"0\r\n\r\n")


async def text_after_the_finish(reply: Reply) -> None:
    await reply.finish()
    await reply.text("more")
    await reply.end_stream()


async def two_finishes(reply: Reply) -> None:
    await reply.finish()
    await reply.finish()
    await reply.end_stream()


async def text_after_an_error(reply: Reply) -> None:
    await reply.event(error())
    await reply.text("more")
    await reply.raw(b"0\r\n\r\n")


async def no_json(reply: Reply) -> None:
    await reply.event("{not json")
    await reply.end_stream()


async def wrong_shape(reply: Reply) -> None:
    await reply.event({"choices": [{"index": "x"}]})
    await reply.end_stream()


async def no_chunk(reply: Reply) -> None:
    await reply.raw(b"what is this\r\n")


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (no_end, End.LOST),
        (cut_event, End.LOST),
        (cut_body, End.LOST),
        (no_finish, End.MALFORMED),
        (two_ends, End.MALFORMED),
        (two_errors, End.MALFORMED),
        (error_after_the_end, End.MALFORMED),
        (text_after_the_finish, End.MALFORMED),
        (two_finishes, End.MALFORMED),
        (text_after_an_error, End.MALFORMED),
        (no_json, End.MALFORMED),
        (wrong_shape, End.MALFORMED),
        (no_chunk, End.MALFORMED),
    ],
)
def test_a_stream_that_does_not_end_exactly_once_is_told(script: Callable[[Reply], Awaitable[None]], end: End) -> None:
    async def begun(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await script(reply)

    outcome = send(begun)
    assert outcome.end is end
    assert outcome.fault
    assert not outcome.end.is_proper


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"error": {"message": "x"}}, "200 OK"),
        ({"detail": "x"}, "500 Internal Server Error"),
        ({"choices": [{"index": 0, "message": {"content": "x"}}]}, "200 OK"),
        ([], "200 OK"),
    ],
)
def test_a_whole_answer_that_breaks_the_rules_is_told(value: Any, status: str) -> None:
    async def whole(seen: Seen, reply: Reply) -> None:
        await reply.json(value, status)

    assert send(whole).end is End.MALFORMED


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


async def endless(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    while True:
        await reply.text("on ")
        await asyncio.sleep(0.005)


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


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
        ("localhost:1234/v1/", "localhost", 1234, ""),
        ("http://[::1]:9/api/v1", "::1", 9, "/api"),
        ("http://box", "box", 80, ""),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str) -> None:
    target = Target.of_url(url)
    assert (target.host, target.port, target.prefix) == (host, port, prefix)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "", "http://[::1", "http://a..b", "http://me:secret@box/v1"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as told:
        Target.of_url(url)
    assert "secret" not in told.value.message


@pytest.mark.parametrize("key", ["a\nb", "k\u00e9y", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UsageError) as told:
        Target.of_url("http://box", key=key)
    assert key not in told.value.message


def test_a_prefix_is_quoted() -> None:
    assert Target.of_url("http://box/my models/\u00e4/v1").prefix == "/my%20models/%C3%A4"


def test_a_closed_loop_keeps_its_connections_and_one_call_a_client() -> None:
    n_running = most = 0

    async def counted(seen: Seen, reply: Reply) -> None:
        nonlocal n_running, most
        n_running += 1
        most = max(most, n_running)
        await asyncio.sleep(0.002)
        n_running -= 1
        await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> int:
        await closed_loop(server.target(), [[CHAT] * 10] * 4, outcomes.append)
        return server.n_connections

    assert talk(counted, work) == 4
    assert most == 4
    assert sorted(outcome.client for outcome in outcomes) == sorted([0, 1, 2, 3] * 10)
    assert {outcome.end for outcome in outcomes} == {End.ANSWER}


def test_a_closed_loop_ends_after_its_duration_and_sends_every_call_it_drew() -> None:
    outcomes: list[Outcome] = []
    n_drawn = itertools.count()
    calls = (CHAT for _ in n_drawn)

    async def work(server: StandIn) -> None:
        await closed_loop(server.target(), [calls, itertools.repeat(CHAT)], outcomes.append, duration_s=0.2)

    begun_s = time.perf_counter()
    talk(story, work)
    assert 0.2 <= time.perf_counter() - begun_s < 2
    assert sum(outcome.client == 0 for outcome in outcomes) == next(n_drawn) > 2


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


def test_an_open_loop_hides_no_wait() -> None:
    # One server that serves one call at a time, 50 ms each, called every 10 ms: the tenth waits about 400 ms.
    lock = asyncio.Lock()

    async def one_at_a_time(seen: Seen, reply: Reply) -> None:
        async with lock:
            await asyncio.sleep(0.05)
            await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> None:
        await open_loop(server.target(), [(0.01 * i, CHAT) for i in range(10)], outcomes.append)

    talk(one_at_a_time, work)
    waits_s = sorted(outcome.ended_s - outcome.due_s for outcome in outcomes)
    assert len(waits_s) == 10
    assert waits_s[-1] >= 0.39
    assert waits_s[5] >= 0.22


def test_an_open_loop_sends_at_its_times() -> None:
    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> float:
        begun_s = time.perf_counter()
        await open_loop(server.target(), [(0.0, CHAT), (0.05, CHAT), (0.1, CHAT)], outcomes.append)
        return begun_s

    begun_s = talk(story, work)
    for outcome, offset_s in zip(outcomes, (0.0, 0.05, 0.1), strict=True):
        assert outcome.due_s == pytest.approx(begun_s + offset_s, abs=0.01)
        assert 0 <= outcome.started_s - outcome.due_s < 0.03


async def stop_soon(stop: asyncio.Event, after_s: float = 0.1) -> None:
    await asyncio.sleep(after_s)
    stop.set()


def test_a_stopped_closed_loop_cancels_what_is_under_way_and_keeps_all() -> None:
    outcomes: list[Outcome] = []
    n_drawn = itertools.count()

    async def slow_after_two(seen: Seen, reply: Reply) -> None:
        if seen.fields.get("n", 0) >= 2:
            await endless(seen, reply)
        await story(seen, reply)

    def calls(counter: Any) -> Any:
        for n in itertools.count():
            next(counter)
            yield Call.of("/v1/chat/completions", {"n": n})

    async def work(server: StandIn) -> None:
        stop = asyncio.Event()
        stopping = asyncio.create_task(stop_soon(stop))
        await closed_loop(server.target(), [calls(n_drawn), calls(n_drawn)], outcomes.append, stop=stop)
        await stopping

    begun_s = time.perf_counter()
    talk(slow_after_two, work)
    assert time.perf_counter() - begun_s < 5
    ends = [outcome.end for outcome in outcomes]
    assert ends == [End.ANSWER] * 4 + [End.CANCELLED] * 2
    assert len(outcomes) == next(n_drawn)  # nothing that was drawn is lost
    assert all(outcome.token_s for outcome in outcomes)


def test_a_stopped_open_loop_sends_no_more_and_keeps_what_was_sent() -> None:
    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> int:
        stop = asyncio.Event()
        stopping = asyncio.create_task(stop_soon(stop))
        arrivals = ((0.02 * n, CHAT) for n in itertools.count())
        await open_loop(server.target(), arrivals, outcomes.append, stop=stop)
        await stopping
        return len(server.seen)

    n_seen = talk(endless, work)
    assert {outcome.end for outcome in outcomes} == {End.CANCELLED}
    assert 1 <= n_seen <= len(outcomes) <= 8


def test_an_open_loop_that_is_far_behind_can_still_be_stopped() -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("nobody there")

    async def run() -> int:
        asyncio.get_running_loop().create_connection = refuse  # type: ignore[method-assign]
        n_outcomes = itertools.count()
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stop_soon(stop))
            await open_loop(
                Target("127.0.0.1", 1), ((0.0, CHAT) for _ in range(200_000)), lambda _: next(n_outcomes), stop=stop
            )
        return next(n_outcomes)

    assert 0 < asyncio.run(run()) < 200_000


@pytest.mark.parametrize(("told", "seconds"), [("2", 2.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("inf", None)])
def test_when_to_try_again(told: str, seconds: float | None) -> None:
    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.json(error(), "429 Too Many Requests", [f"retry-after: {told}"])

    assert send(refuse).retry_after_s == seconds


def test_a_loop_stopped_before_it_began_sends_nothing() -> None:
    async def work(server: StandIn) -> list[Outcome]:
        stop = asyncio.Event()
        stop.set()
        outcomes: list[Outcome] = []
        await closed_loop(server.target(), [[CHAT]], outcomes.append, stop=stop)
        await open_loop(server.target(), [(0.0, CHAT)], outcomes.append, stop=stop)
        return outcomes

    assert talk(story, work) == []


def test_a_stop_does_not_wait_for_a_connection_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)

    async def run(load: Callable[..., Awaitable[None]], calls: Any) -> list[Outcome]:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        outcomes: list[Outcome] = []
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stop_soon(stop))
            await load(Target("127.0.0.1", 1), calls, outcomes.append, stop=stop)
        return outcomes

    begun_s = time.perf_counter()
    assert asyncio.run(run(closed_loop, [[CHAT]])) == []  # none was sent
    assert [outcome.end for outcome in asyncio.run(run(open_loop, [(0.0, CHAT)]))] == [End.CANCELLED]
    assert time.perf_counter() - begun_s < 5


def test_a_bound_on_connections_is_told_as_the_clients_own() -> None:
    async def slow(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(0.3)
        await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> None:
        loop = asyncio.get_running_loop()
        connect, n_open = loop.create_connection, itertools.count(1)

        async def at_most_two(*arguments: Any, **settings: Any) -> Any:
            if next(n_open) > 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return await connect(*arguments, **settings)

        loop.create_connection = at_most_two  # type: ignore[method-assign,assignment]
        await open_loop(server.target(), [(0.0, CHAT)] * 4, outcomes.append)

    talk(slow, work)
    assert sorted(outcome.end.value for outcome in outcomes) == ["answer", "answer", "unreachable", "unreachable"]
    assert all("ulimit -n" in outcome.fault for outcome in outcomes if outcome.end is End.UNREACHABLE)


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
