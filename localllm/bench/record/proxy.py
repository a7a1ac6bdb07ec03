"""A proxy on this machine that passes everything on as it comes, and keeps what a benchmark can send again."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import h11

from localllm.bench.client.calls import Target
from localllm.bench.client.http1 import EventSplitter, Malformed
from localllm.bench.record.client_side import ClientGone, ClientSide
from localllm.bench.record.heads import check, to_client, to_upstream
from localllm.bench.record.keeper import Keeper, Seen
from localllm.bench.record.upstream import Upstream, connected
from localllm.bench.workloads.trace import PATHS
from localllm.errors import LocalLLMError, ServerUnreachable

MAX_SEEN_BYTES: Final = 64 << 20
MAX_CONNECTIONS: Final = 256
_BACKLOG: Final = 256


class _AnswerCut(Exception):
    """The server behind broke off within its answer."""


class Proxy:
    """Listens on loopback and passes on to `target`. All of it on the event loop's thread.

    `on_fault` hears of what went wrong here, by its kind: what an exception says may hold text.
    """

    def __init__(self, target: Target, keeper: Keeper, on_fault: Callable[[str], None]) -> None:
        self._target = target
        self._keeper = keeper
        self._on_fault = on_fault
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s = time.perf_counter()
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        sockets = _bind()
        self.port = sockets[0].getsockname()[1]
        self._began_s = time.perf_counter()
        for sock in sockets:
            self._servers.append(await asyncio.start_server(self._accepted, sock=sock, backlog=_BACKLOG))

    async def close(self) -> None:
        """Stop listening and cut what is under way; each of that is kept as broken."""
        for server in self._servers:
            server.close()
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(ClientSide(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: ClientSide) -> None:
        """Answer one request after another of a connection."""
        try:
            while await self._answer(client):
                pass
        except LocalLLMError as error:
            await client.refuse(error)
        except ClientGone:
            pass
        except (_AnswerCut, asyncio.CancelledError):
            client.abort()  # its head may be out: only the connection's end can still tell
        except Exception as error:
            client.abort()
            self._on_fault(f"{type(error).__name__} while a request was passed on")
        finally:
            with suppress(asyncio.CancelledError):
                await client.close()

    async def _answer(self, client: ClientSide) -> bool:
        """Pass on one request; return whether another may follow. Raises LocalLLMError, ClientGone."""
        request = await client.next_request()
        if request is None:
            return False
        check(request, self.port)
        path = urlsplit(request.target.decode("latin-1")).path
        is_recorded = request.method == b"POST" and path in PATHS
        body = await client.body()
        seen = Seen(self._now_s(), path, body)
        try:
            await self._unless_gone(client, self._pass_on(client, request, seen, is_recorded))
        except ClientGone:
            seen.ended = "cancelled"
            raise
        except ServerUnreachable as error:
            seen.status = error.http_status
            raise
        finally:
            seen.ended_s = self._now_s()
            if is_recorded:
                self._keeper.keep(seen)
        return client.is_kept_open()

    async def _unless_gone(self, client: ClientSide, work: Coroutine[None, None, None]) -> None:
        """Do `work` until it ends; give it up as soon as the client goes. Raises what it raises, or ClientGone."""
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(client.gone())
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClientGone
            doing.result()
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _pass_on(self, client: ClientSide, request: h11.Request, seen: Seen, is_recorded: bool) -> None:
        target = self._target
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = to_upstream(request, f"{host}:{target.port}", len(seen.body), is_recorded=is_recorded)
        async with connected(target) as upstream:
            await upstream.send(request.method, target.prefix.encode() + request.target, headers, seen.body)
            try:
                await self._answer_with(client, upstream, seen, is_recorded)
            except ServerUnreachable:
                if seen.status is None:
                    raise
                raise _AnswerCut from None

    async def _answer_with(self, client: ClientSide, upstream: Upstream, seen: Seen, is_recorded: bool) -> None:
        splitter, n_bytes = EventSplitter(), 0
        async for event in upstream.events():
            arrived_s = self._now_s()
            if isinstance(event, h11.Response):
                seen.status = event.status_code
                kinds = [value for name, value in event.headers if name == b"content-type"]
                seen.is_stream = bool(kinds) and kinds[0].startswith(b"text/event-stream")
                head = h11.Response(status_code=event.status_code, headers=to_client(event), reason=event.reason)
                await client.write(head)
                continue
            if isinstance(event, h11.EndOfMessage):
                seen.is_whole, seen.ended = True, "answer"
                await client.write(h11.EndOfMessage())
                continue
            await client.write(h11.Data(data=event.data))
            n_bytes += len(event.data)
            if is_recorded and n_bytes <= MAX_SEEN_BYTES:
                _see(seen, splitter, arrived_s, bytes(event.data))

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def _see(seen: Seen, splitter: EventSplitter, arrived_s: float, data: bytes) -> None:
    """Keep a piece of an answer until it ends, to count what is in it."""
    if not seen.is_stream:
        seen.answer.append(data)
        return
    with suppress(Malformed):
        seen.events.extend((arrived_s, event) for event in splitter.feed(data))
    seen.rest = splitter.rest


def _bind() -> list[socket.socket]:
    """Return listening sockets on both loopback addresses, where there are two, with one port that is free."""
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)]
    with suppress(OSError):
        same = sockets[0].getsockname()[1]
        sockets.append(socket.create_server(("::1", same), family=socket.AF_INET6, backlog=_BACKLOG))
    return sockets
