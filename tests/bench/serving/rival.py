"""A server of the OpenAI API in a thread, made up: what it lists, how it answers, what it gets wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.bench.client.stand_in import Reply, Script, Seen, StandIn, stand_in

Fault = Callable[["Rival", Seen, Reply], Awaitable[bool]]


@dataclass
class Rival:
    """How it answers; every request that asks for an answer is kept in `asked`.

    `natural_tokens`: length of an answer that ends by itself. `first_s`, `token_s`: its delays. `fault`: answers in
    place of it, where it says so. `routes`: further GET and POST routes, by path.
    """

    models: tuple[str, ...] = ("small",)
    natural_tokens: int = 4
    honours_ignore_eos: bool = False
    keeps_max_tokens: bool = True
    tells_usage: bool = True
    piece: str = "word "
    first_s: float = 0.0
    token_s: float = 0.0
    key: str | None = None
    lists_to_anybody: bool = False
    answer: str | None = None
    calls_tools: bool = False
    heeds_suffix: bool = False
    fault: Fault | None = None
    routes: dict[str, Any] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    n_open: int = 0
    n_most_open: int = 0

    async def __call__(self, seen: Seen, reply: Reply) -> None:
        """Answer one request."""
        path = seen.line.split(" ")[1]
        self.paths.append(path)
        is_list = path == "/v1/models"
        is_known = self.key is None or seen.headers.get("authorization") == f"Bearer {self.key}"
        if not is_known and not (is_list and self.lists_to_anybody):
            await reply.json({"error": {"message": "no", "code": "bad_key"}}, "401 Unauthorized")
        elif is_list:
            await reply.json({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})
        elif path in self.routes:
            route = self.routes[path]
            await reply.json(route(seen.fields) if callable(route) else route)
        elif path in ("/v1/chat/completions", "/v1/completions"):
            await self._answer(seen, reply)
        else:
            await reply.json({"error": {"message": "no such route"}}, "404 Not Found")

    async def _answer(self, seen: Seen, reply: Reply) -> None:
        self.asked.append(seen.fields)
        self.n_open += 1
        self.n_most_open = max(self.n_most_open, self.n_open)
        try:
            if self.fault is None or not await self.fault(self, seen, reply):
                await self._stream(seen.fields, reply)
        finally:
            self.n_open -= 1

    async def _stream(self, fields: dict[str, Any], reply: Reply) -> None:
        limit = fields["max_tokens"] if self.keeps_max_tokens else 10**6
        fills = self.honours_ignore_eos and fields.get("ignore_eos")
        n_tokens = min(limit, 10**6 if fills else self.natural_tokens)
        await asyncio.sleep(self.first_s)
        await reply.begin_stream()
        pieces = [self.piece] * n_tokens if self.answer is None else [self.answer]
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(self.token_s)
            await self._piece(piece, reply)
        reason = "length" if self.answer is None and n_tokens == fields["max_tokens"] else "stop"
        await reply.finish("tool_calls" if self.calls_tools else reason)
        n_prompt = 15 if self.heeds_suffix and fields.get("suffix") else 10
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}
        await reply.end_stream(usage=usage if self.tells_usage else None)

    async def _piece(self, piece: str, reply: Reply) -> None:
        if self.calls_tools:
            call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            await reply.event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
        else:
            await reply.text(piece)

    def texts(self) -> list[str]:
        """Return how each of the asked begins: its first message, or its prompt."""
        return [str(one["messages"][0]["content"]) if "messages" in one else str(one["prompt"]) for one in self.asked]


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Serve `script` from a thread of its own; give its address."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    where: list[StandIn] = []
    over = asyncio.Event()

    async def serve() -> None:
        async with stand_in(script) as running:
            where.append(running)
            ready.set()
            await over.wait()
        await asyncio.sleep(0.01)  # connections that were closed are closed then

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{where[0].port}"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
