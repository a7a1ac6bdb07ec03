"""Talks to a stand-in by script: what tests of the client and of its loads share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from localllm.bench.client.calls import Call, Outcome
from localllm.bench.client.client import Client
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


def error(code: str | None = "queue_full") -> dict[str, Any]:
    return {"error": {"message": "no", "type": "x", "param": None, "code": code}}


async def endless(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    while True:
        await reply.text("on ")
        await asyncio.sleep(0.005)
