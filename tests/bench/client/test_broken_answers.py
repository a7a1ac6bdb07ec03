from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from localllm.bench.client import exchange
from localllm.bench.client.calls import End
from tests.bench.client.stand_in import Reply, Seen
from tests.bench.client.talking import error, send


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


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [("MAX_EVENTS", 100, "more than 100 events"), ("MAX_BODY_BYTES", 1 << 20, "longer than 1 MiB")],
)
@pytest.mark.parametrize("piece", [b": ping\n\n", b'data: {"choices":[{"index":0,"delta":{"content":"on"}}]}\n\n'])
def test_a_stream_without_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, words: str, piece: bytes
) -> None:
    async def endless(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        while True:
            await reply.chunk(100 * piece)

    monkeypatch.setattr(exchange, limit, most)
    outcome = send(endless)
    assert (outcome.end, outcome.fault.partition(": ")[0]) == (End.MALFORMED, "the answer does not end")
    assert words in outcome.fault
