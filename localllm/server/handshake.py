"""A connection until its TLS is agreed on: limited in time and number like one without a request."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

from localllm.server.connections import Connection, Gate


class Handshake(asyncio.Protocol):
    """Stands where the connection will be; the event loop alone would count and bound none of these."""

    def __init__(self, gate: Gate, context: ssl.SSLContext, make_connection: Callable[[], Connection]) -> None:
        self._gate = gate
        self._context = context
        self._make_connection = make_connection
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = bytearray()
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake. The loop calls this once, before there is TLS."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # what comes belongs to the handshake
        self._gate.waits(self)
        self._task = asyncio.get_running_loop().create_task(self._agree(transport))

    def data_received(self, data: bytes) -> None:
        """Keep what came along with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone already."""
        self._has_ended = True

    def drop(self) -> None:
        """Close at once."""
        self._gate.leaves(self)
        if self._transport is not None:
            self._transport.abort()

    async def _agree(self, transport: asyncio.Transport) -> None:
        agreed, limit_s = None, self._gate.limits.header_s
        with contextlib.suppress(OSError):  # SSLError and TimeoutError among them: the loop closes
            agreed = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,  # a client that does not answer the end is closed all the same
            )
        self._gate.leaves(self)
        if agreed is None or agreed.is_closing() or self._has_ended:
            transport.abort()
            return
        connection = self._make_connection()
        agreed.set_protocol(connection)
        connection.connection_made(agreed)
        if self._early:
            connection.data_received(bytes(self._early))
