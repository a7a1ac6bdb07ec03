"""One connection to an endpoint: sends a request, notes when each piece of the answer came, judges how it ended.

On an asyncio transport, so a piece has the time at which the event loop read it from the socket;
it is decoded only after the answer ended, away from the times that are measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from localllm.bench.client.answers import Answer, fold_body, fold_stream
from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.http1 import AnswerReader, EventSplitter, Malformed

MAX_BODY_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 10.0
STALE_AFTER_S = 1.0
"""A connection idle for so long may have been closed by the server as we sent: the call is sent once more."""


class Client:
    """One connection to a target, opened again when it must be. One call at a time."""

    def __init__(self, target: Target, number: int = 0) -> None:
        self._target = target
        self._number = number
        self._connection: _Connection | None = None
        self._used_s = 0.0

    async def send(
        self, call: Call, due_s: float | None = None, on_event: Callable[[float], None] | None = None
    ) -> Outcome:
        """Send one request and return what became of it; never raises for what the other side does.

        `due_s`: when it was to be sent. `on_event` hears when each event of a stream came, as it comes.
        """
        started_s = time.perf_counter()
        due_s = started_s if due_s is None else due_s
        was_idle = self._connection is not None and started_s - self._used_s > STALE_AFTER_S
        exchange, n_sends = await self._attempt(call, on_event), 1
        if was_idle and exchange.is_stale:  # closed while idle, as we sent: that is no answer
            exchange, n_sends = await self._attempt(call, on_event), 2
        self._used_s = time.perf_counter()
        if exchange.end is not None or not exchange.reader.keeps_alive:
            self.close()
        return replace(_outcome(call, self._number, exchange, due_s, started_s), n_sends=n_sends)

    async def _attempt(self, call: Call, on_event: Callable[[float], None] | None) -> _Exchange:
        exchange = _Exchange(call, on_event)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._connected()
        except (OSError, TimeoutError) as error:
            exchange.finish(End.UNREACHABLE, str(error) or "no connection in time")
            return exchange
        connection.begin(exchange, _request_bytes(self._target, call))
        await _ended(exchange, self._target.timeout_s)
        if exchange.end is not None:
            connection.abort()
        return exchange

    async def _connected(self) -> _Connection:
        if self._connection is None or not self._connection.is_open:
            target = self._target
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(
                _Connection, target.host, target.port, ssl=target.tls or None
            )
        return self._connection

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None


class _Exchange:
    """One request on the wire: what came of its answer and when. `end` is set where it is not the answer's own."""

    def __init__(self, call: Call, on_event: Callable[[float], None] | None) -> None:
        self.call = call
        self._on_event = on_event
        self.reader = AnswerReader()
        self.events: list[tuple[float, bytes]] = []
        self.body: list[bytes] = []
        self.head_s: float | None = None
        self.end: End | None = None
        self.fault = ""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._splitter = EventSplitter()
        self._n_bytes = 0

    @property
    def is_stream(self) -> bool:
        return self.reader.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_stale(self) -> bool:
        return self.end is End.LOST and not self.reader.has_begun

    def take(self, now_s: float, data: bytes) -> None:
        try:
            pieces = self.reader.feed(data)
            if self.head_s is None and self.reader.status is not None:
                self.head_s = now_s
            for piece in pieces:
                self._take_body(now_s, piece)
        except Malformed as error:
            self.finish(End.MALFORMED, str(error))
            return
        if self.reader.is_complete:
            self.finish()
        elif self.call.cancel_after_events is not None and len(self.events) >= self.call.cancel_after_events:
            self.finish(End.CANCELLED)

    def _take_body(self, now_s: float, piece: bytes) -> None:
        if self.is_stream:
            for event in self._splitter.feed(piece):
                self.events.append((now_s, event))
                if self._on_event is not None:
                    self._on_event(now_s)
            return
        self._n_bytes += len(piece)
        if self._n_bytes > MAX_BODY_BYTES:
            raise Malformed("the body is too long")
        self.body.append(piece)

    def lose(self) -> None:
        """The connection ended."""
        if self.reader.end():
            self.finish()
        else:
            self.finish(End.LOST, "the connection ended in the answer" if self.reader.has_begun else "no answer")

    def finish(self, end: End | None = None, fault: str = "") -> None:
        if not self.done.done():
            self.end, self.fault = end, fault
            self.done.set_result(None)

    @property
    def cut_event(self) -> bool:
        return bool(self._splitter.rest)


async def _ended(exchange: _Exchange, timeout_s: float) -> None:
    """Wait for the end, for the time to cancel, or for the time at which nobody waits any more."""
    loop = asyncio.get_running_loop()
    timers = [loop.call_later(timeout_s, exchange.finish, End.TIMED_OUT, f"no end within {timeout_s:g} s")]
    if exchange.call.cancel_after_s is not None:
        timers.append(loop.call_later(exchange.call.cancel_after_s, exchange.finish, End.CANCELLED))
    try:
        await exchange.done
    finally:
        for timer in timers:
            timer.cancel()


class _Connection(asyncio.Protocol):
    """A connection on which one answer at a time is read."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    def begin(self, exchange: _Exchange, request: bytes) -> None:
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

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._exchange is not None:
            self._exchange.lose()


def _request_bytes(target: Target, call: Call) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"{'GET' if call.body is None else 'POST'} {target.prefix}{call.path} HTTP/1.1",
        f"host: {host}:{target.port}",
        "accept: */*",
        *(f"{name}: {value}" for name, value in (*target.headers, *call.headers)),
    ]
    if call.body is not None:
        if not any(name.lower() == "content-type" for name, _ in call.headers):
            lines.append("content-type: application/json")
        lines.append(f"content-length: {len(call.body)}")
    return "\r\n".join([*lines, "", ""]).encode() + (call.body or b"")


def _outcome(call: Call, client: int, exchange: _Exchange, due_s: float, started_s: float) -> Outcome:
    headers, status = exchange.reader.headers, exchange.reader.status
    ended_s = time.perf_counter()
    answer = Answer()
    if status is not None and status < 400 and exchange.is_stream:
        answer = fold_stream(exchange.events)
    elif exchange.end is None and status is not None:
        answer = fold_body(status, b"".join(exchange.body))
    end, fault = _judge(exchange, answer)
    return Outcome(
        label=call.label,
        client=client,
        end=end,
        is_stream=exchange.is_stream,
        status=status,
        due_s=due_s,
        started_s=started_s,
        head_s=exchange.head_s,
        ended_s=ended_s,
        token_s=tuple(answer.token_s),
        answer_s=answer.answer_s,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        finish_reasons=tuple(answer.finish_reasons.values()),
        error_code=answer.error_code,
        error_message=answer.error_message,
        retry_after_s=_seconds(headers.get("retry-after")),
        request_id=headers.get("x-request-id"),
        timings=answer.timings,
        n_comments=answer.n_comments,
        fault=fault,
        text=answer.text if call.keep_text else "",
    )


def _judge(exchange: _Exchange, answer: Answer) -> tuple[End, str]:
    """Return how it ended, and why that is wrong where it is."""
    status = exchange.reader.status
    if exchange.end is End.CANCELLED:  # what came before must be right all the same
        faults = [fault for fault in answer.faults if "ended without" not in fault]
        return (End.MALFORMED, faults[0]) if faults else (End.CANCELLED, "")
    if exchange.end is not None:
        return exchange.end, exchange.fault
    if exchange.is_stream and exchange.cut_event:
        return End.LOST, "the last event was cut"
    if exchange.is_stream and not answer.terminals:
        return End.LOST, answer.faults[-1]
    if answer.faults:
        return End.MALFORMED, answer.faults[0]
    if status is not None and status >= 400:
        return End.REFUSED, ""
    return (End.ERROR_EVENT, "") if "error" in answer.terminals else (End.ANSWER, "")


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
