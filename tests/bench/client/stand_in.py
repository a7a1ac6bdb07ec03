"""A small HTTP server that answers by script: exact pieces, exact delays, and every way of breaking off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.client.calls import Target


@dataclass
class Seen:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class Reply:
    """What a script answers with. Chunked streams a piece a chunk."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, value: Any, status: str = "200 OK", headers: Sequence[str] = ()) -> None:
        body = json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + body)

    async def begin_stream(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.chunk(f"data: {text}\n\n".encode())

    async def text(self, content: str, index: int = 0) -> None:
        await self.event({"choices": [{"index": index, "delta": {"content": content}}]})

    async def finish(self, reason: str = "stop", index: int = 0) -> None:
        await self.event({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]})

    async def end_stream(self, *, usage: dict[str, Any] | None = None) -> None:
        if usage is not None:
            await self.event({"choices": [], "usage": usage})
        await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")


Script = Callable[[Seen, Reply], Awaitable[None]]


@dataclass
class StandIn:
    """A running stand-in: where it listens and what it saw."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    n_connections: int = 0

    def target(self, **settings: Any) -> Target:
        return Target("127.0.0.1", self.port, **settings)


@asynccontextmanager
async def stand_in(script: Script) -> AsyncIterator[StandIn]:
    """Serve `script` on a free port. Closing the writer in a script ends the connection."""
    running = StandIn()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.n_connections += 1
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            # A cancelled handler that raised would be reported by asyncio as an accident.
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    seen = await read_request(reader)
                    running.seen.append(seen)
                    await script(seen, Reply(writer))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    running.port = server.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> Seen:
    """Read one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(head[0], headers, body)
