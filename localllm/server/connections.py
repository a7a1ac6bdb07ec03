"""One HTTP/1.1 connection: uvicorn's h11 protocol, with limits on time, size and number.

A connection is *incomplete* until a whole request of it has arrived. Complete ones are counted where
work begins; incomplete ones here, where the oldest gives way.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Final, Protocol

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState as Connections

from localllm.errors import LocalLLMError
from localllm.server.errors import HttpRefusal, error_body
from localllm.server.isolation import CONNECTION, new_connection
from localllm.server.state import Limits

_BUFFER_BYTES: Final = 64 * 1024
_LOOK_EVERY_S: Final = 1.0


class Droppable(Protocol):
    """A connection that is counted while it is incomplete."""

    def drop(self) -> None:
        """Close it, as soon as it owes no answer."""
        ...


class Gate:
    """Knows the connections without a complete request, oldest first, and drops those beyond the limit."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._incomplete: dict[Droppable, None] = {}
        self._date_s = 0.0

    def waits(self, connection: Droppable) -> None:
        """Count a connection that waits for a request, from now on."""
        self._incomplete.pop(connection, None)
        self._incomplete[connection] = None
        if len(self._incomplete) > self.limits.n_incomplete:
            next(iter(self._incomplete)).drop()

    def leaves(self, connection: Droppable) -> None:
        """Count it no more: its request is complete, or it is gone. Idempotent."""
        self._incomplete.pop(connection, None)

    def drop_all(self) -> None:
        """Close every connection that waits."""
        for connection in list(self._incomplete):
            connection.drop()

    def update_date(self, connections: Connections) -> None:
        """Keep the Date header right to the second, without a timer."""
        now_s = time.time()
        if now_s - self._date_s >= 1:
            self._date_s = now_s
            connections.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]


class Connection(H11Protocol):
    """A client's connection. Owned by the event loop."""

    def __init__(self, config: Config, connections: Connections, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config, connections, {CONNECTION: new_connection()}, loop)
        self._gate = gate
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._held_bytes = 0
        self._moved_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers, with small buffers: what a reader does not take should be seen soon."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._gate.waits(self)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes, and see how far the request has come."""
        self._gate.update_date(self.server_state)
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer; whoever answers is told by the protocol above."""
        self._gate.leaves(self)
        self._stop_timers()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._gate.waits(self)
        super().on_response_complete()
        if not self.transport.is_closing():
            self._look()

    def pause_writing(self) -> None:
        """Watch a reader that does not keep up."""
        super().pause_writing()
        self._held_bytes, self._moved_s = self.transport.get_write_buffer_size(), self.loop.time()
        self._stall_timer = self.loop.call_later(_LOOK_EVERY_S, self._check_reader)

    def resume_writing(self) -> None:
        """The reader kept up again."""
        super().resume_writing()
        self._stop_stall_timer()

    def drop(self) -> None:
        """Close: at once, or as soon as the answer before is out."""
        self._gate.leaves(self)
        if not self._unsent_bytes():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with a JSON error, and close; only close where an answer is under way."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        status = status if status < 500 else 415  # a transfer coding that is not known: no fault of the server's
        self._refuse(HttpRefusal(status, "bad_http", "This is no HTTP request that the server takes."))

    def _refuse(self, error: LocalLLMError) -> None:
        self._stop_timers()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(error))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            status = error.http_status
            told = (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in told))
        self.transport.close()

    def _look(self) -> None:
        """See what the client still owes: headers, a body, nothing."""
        owes = self.conn.their_state
        if owes is h11.IDLE:
            if self._header_timer is None and self.timeout_keep_alive_task is None:
                self._expect_headers()
            return
        self._stop_header_timer()
        if owes is not h11.SEND_BODY:
            self._gate.leaves(self)
        if self.flow.read_paused and len(self.conn.trailing_data[0]) < _BUFFER_BYTES and owes is h11.DONE:
            self.flow.resume_reading()  # a request that came too early must not hide that the client goes

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._gate.limits.header_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(HttpRefusal(408, "headers_too_slow", "The headers of the request did not come in time."))
        else:
            self.transport.close()

    def _check_reader(self) -> None:
        """Drop a reader that takes nothing, or for whom too much is held."""
        limits, now_s = self._gate.limits, self.loop.time()
        held_bytes = self.transport.get_write_buffer_size()
        if held_bytes < self._held_bytes:
            self._held_bytes, self._moved_s = held_bytes, now_s
        if now_s - self._moved_s >= limits.stalled_s or held_bytes + self._backlog() > limits.output_bytes:
            self.transport.abort()
            return
        self._stall_timer = self.loop.call_later(_LOOK_EVERY_S, self._check_reader)

    def _unsent_bytes(self) -> int:
        try:
            return self.transport.get_write_buffer_size()
        except AttributeError:  # TLS that was closed twice: its transport has let go of everything
            return 0

    def _backlog(self) -> int:
        """Return the bytes that the one who answers holds for this reader."""
        backlog: Callable[[], int] | None = self.scope["state"].get("backlog")
        return backlog() if backlog is not None else 0

    def _stop_timers(self) -> None:
        self._stop_header_timer()
        self._stop_stall_timer()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
