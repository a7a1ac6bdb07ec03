"""One connection to an endpoint: sends a request, notes when each piece of the answer came, judges how it ended.

On an asyncio transport, so a piece has the time at which the event loop read it from the socket;
it is decoded only after the answer ended, away from the times that are measured.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from contextlib import suppress

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.exchange import Exchange

CONNECT_TIMEOUT_S = 10.0
STALE_AFTER_S = 1.0
"""A connection idle for so long may have been closed by the server as we sent: the call is sent once more."""
CLOSED_WITHIN_S = 0.25
"""One that ends so soon after it was used again was closed before: some servers close after a stream, unsaid."""


class Client:
    """One connection to a target, opened again when it must be. One call at a time."""

    def __init__(self, target: Target, number: int = 0) -> None:
        self._target = target
        self._number = number
        self._connection: _Connection | None = None
        self._exchange: Exchange | None = None
        self._connecting: asyncio.Timeout | None = None
        self._used_s = 0.0
        self._is_kept = True  # the server keeps connections open, as far as it was seen

    async def send(
        self, call: Call, due_s: float | None = None, on_event: Callable[[float], None] | None = None
    ) -> Outcome:
        """Send one request and return what became of it; never raises for what the other side does.

        `due_s`: when it was to be sent. `on_event` hears when each event of a stream came, as it comes.
        Raises UsageError: a path or header that HTTP cannot carry.
        """
        exchange, request = self._prepared(call, on_event)
        n_sends, started_s = 1, time.perf_counter()
        due_s = started_s if due_s is None else due_s
        was_idle = self._connection is not None and started_s - self._used_s > STALE_AFTER_S
        was_used = self._connection is not None and self._connection.is_open and self._connection.n_answers > 0
        await self._attempt(exchange, request)
        was_closed = was_used and time.perf_counter() - started_s < CLOSED_WITHIN_S
        if exchange.is_stale and (was_idle or was_closed):  # closed before we sent: that is no answer
            self._is_kept = not was_closed
            exchange, request = self._prepared(call, on_event)
            n_sends = 2
            await self._attempt(exchange, request)
        self._used_s = time.perf_counter()
        if exchange.end is not None or not exchange.reader.keeps_alive or not self._is_kept:
            self.close()
        return await exchange.outcome(self._number, due_s, started_s, n_sends)

    def cancel(self) -> None:
        """End the call that is under way, if there is one: its outcome is End.CANCELLED."""
        if self._exchange is not None:
            self._exchange.finish(time.perf_counter(), End.CANCELLED)
        if self._connecting is not None:
            self._connecting.reschedule(0)

    async def connect(self) -> None:
        """Open the connection where there is none. That it cannot be opened is told by the next call."""
        with suppress(OSError, TimeoutError):
            await self._connected()

    def _prepared(self, call: Call, on_event: Callable[[float], None] | None) -> tuple[Exchange, bytes]:
        exchange = Exchange(call, on_event)
        return exchange, _request_bytes(self._target, call, exchange)

    async def _attempt(self, exchange: Exchange, request: bytes) -> None:
        self._exchange = exchange
        try:
            connection = await self._connected()
            if not exchange.done.done():
                connection.begin(exchange, request)
                await _ended(exchange, self._target.timeout_s)
            if exchange.end is not None:
                connection.abort()
        except (OSError, TimeoutError) as error:
            exchange.finish(time.perf_counter(), End.UNREACHABLE, _why(error))
        finally:
            self._exchange = None

    async def _connected(self) -> _Connection:
        """Return an open connection. Raises OSError, TimeoutError."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as self._connecting:
                _, self._connection = await loop.create_connection(
                    _Connection, target.host, target.port, ssl=target.tls or None
                )
        finally:
            self._connecting = None
        self._used_s = time.perf_counter()
        return self._connection

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None


async def _ended(exchange: Exchange, timeout_s: float) -> None:
    """Wait for the end, for the time to cancel, or for the time at which nobody waits any more."""

    def finish(end: End, fault: str = "") -> None:
        exchange.finish(time.perf_counter(), end, fault)

    loop = asyncio.get_running_loop()
    timers = [loop.call_later(timeout_s, finish, End.TIMED_OUT, f"no end within {timeout_s:g} s")]
    if exchange.call.cancel_after_s is not None:
        timers.append(loop.call_later(exchange.call.cancel_after_s, finish, End.CANCELLED))
    try:
        await exchange.done
    finally:
        for timer in timers:
            timer.cancel()


class _Connection(asyncio.Protocol):
    """A connection on which one answer at a time is read."""

    def __init__(self) -> None:
        self.is_open = False
        self.n_answers = 0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None

    def begin(self, exchange: Exchange, request: bytes) -> None:
        assert self._transport is not None
        self._exchange = exchange
        self._transport.write(request)

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._exchange is None or self._exchange.done.done():
            self.abort()  # an answer to nothing
        else:
            self._exchange.take(now_s, data)
            self.n_answers += self._exchange.reader.is_complete

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._exchange is not None:
            self._exchange.lose()


def _request_bytes(target: Target, call: Call, exchange: Exchange) -> bytes:
    """Return the request. Raises UsageError: what HTTP cannot carry."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = [("host", f"{host}:{target.port}"), ("accept", "*/*"), ("accept-encoding", "identity")]
    headers += [*target.headers, *call.headers]
    if call.body is not None:
        if not any(name.lower() == "content-type" for name, _ in call.headers):
            headers.append(("content-type", "application/json"))
        headers.append(("content-length", str(len(call.body))))
    method = "GET" if call.body is None else "POST"
    return exchange.reader.request(method, target.prefix + call.path, headers, call.body or b"")


def _why(error: OSError | TimeoutError) -> str:
    """Return why there is no connection; where this process is the one that may have no more, that."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "this client may open no more connections at once: ulimit -n"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no port left for another connection"
    return str(error) or "no connection in time"
