"""The connection of one who asks the proxy: reads requests, writes answers, notices who goes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import h11

from localllm.bench.record.heads import MAX_HEAD_BYTES, Refused, refusal
from localllm.errors import LocalLLMError

MAX_BODY_BYTES: Final = 64 << 20
IDLE_TIMEOUT_S: Final = 120.0
BODY_TIMEOUT_S: Final = 60.0
_READ_BYTES: Final = 64 << 10
_MAX_EARLY_BYTES: Final = 1 << 20
_LINGER_S: Final = 1.0


class ClientGone(Exception):
    """Who asked has closed the connection."""


class ClientSide:
    """One connection. One task at a time reads, one writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._n_early_bytes = 0

    async def next_request(self) -> h11.Request | None:
        """Return the next request's head; None where none comes. Raises Refused for what is no HTTP."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                event = await self._next_event()
        except (TimeoutError, ClientGone):
            return None
        return event if isinstance(event, h11.Request) else None

    async def body(self) -> bytes:
        """Return the request's body. Raises Refused (413, 408, 400), ClientGone."""
        if self._http.they_are_waiting_for_100_continue:
            await self.write(h11.InformationalResponse(status_code=100, headers=[]))
        parts: list[bytes] = []
        n_bytes = 0
        while True:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    event = await self._next_event()
            except TimeoutError:
                raise Refused(408, "body_too_slow", "The body of the request did not come in time.") from None
            if not isinstance(event, h11.Data):
                return b"".join(parts)
            n_bytes += len(event.data)
            if n_bytes > MAX_BODY_BYTES:
                raise Refused(413, "body_too_large", f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.")
            parts.append(bytes(event.data))

    async def gone(self) -> None:
        """Return when the client has closed the connection; what it sends before is kept for the next request."""
        with suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                self._http.receive_data(data)
                self._n_early_bytes += len(data)
                if self._n_early_bytes > _MAX_EARLY_BYTES:
                    return

    async def write(self, event: h11.Event) -> None:
        """Write a part of the answer now; waits while the client does not read. Raises ClientGone."""
        try:
            data = self._http.send(event)
            if data:
                self._writer.write(data)
                await self._writer.drain()
        except (OSError, h11.LocalProtocolError):
            raise ClientGone from None

    async def refuse(self, error: LocalLLMError) -> None:
        """Answer with an error where an answer is still due, and let it arrive before the connection ends."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        head, body = refusal(error)
        with suppress(ClientGone):
            await self.write(head)
            await self.write(h11.Data(data=body))
            await self.write(h11.EndOfMessage())
            await self._linger()

    def is_kept_open(self) -> bool:
        """Make ready for another request; False where the connection must end."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self._n_early_bytes = 0
        return True

    def abort(self) -> None:
        """End the connection so that the client sees it was not the answer's own end."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _linger(self) -> None:
        """Read on for a moment: a close with bytes unread would take the answer back from under the client."""
        with suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(_READ_BYTES):
                    pass

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        """Return what comes next of the request. Raises Refused, ClientGone."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(_READ_BYTES)
                self._http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise Refused(error.error_status_hint, "bad_http", "This is no HTTP request.") from None
        except OSError:
            raise ClientGone from None
        if isinstance(event, h11.ConnectionClosed):
            raise ClientGone
        return event  # type: ignore[return-value]
