"""The connection to the server behind the proxy: one request, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import h11

from localllm.bench.client.calls import Target
from localllm.bench.record.heads import MAX_HEAD_BYTES, Headers
from localllm.errors import ServerUnreachable

CONNECT_TIMEOUT_S: Final = 10.0
_READ_BYTES: Final = 64 << 10


class Upstream:
    """One request sent; events of its answer, each as soon as its bytes are there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def send(self, method: bytes, path: bytes, headers: Headers, body: bytes) -> None:
        """Send the whole request. Raises ServerUnreachable."""
        try:
            self._write(h11.Request(method=method, target=path, headers=headers))
            if body:
                self._write(h11.Data(data=body))
            self._write(h11.EndOfMessage())
            await self._writer.drain()
        except (OSError, h11.LocalProtocolError):
            raise _unreachable("closed the connection") from None

    async def events(self) -> AsyncIterator[h11.Response | h11.Data | h11.EndOfMessage]:
        """Yield the answer's head, the pieces of its body, its end. Raises ServerUnreachable where it is cut."""
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_READ_BYTES))
                    continue
            except (OSError, h11.RemoteProtocolError):
                raise _unreachable("broke off, or does not speak HTTP") from None
            if isinstance(event, (h11.Response, h11.Data)):
                yield event
            elif isinstance(event, h11.EndOfMessage):
                yield event
                return
            elif not isinstance(event, h11.InformationalResponse):
                raise _unreachable("closed the connection")

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Upstream]:
    """Connect for one request, and end the connection whatever became of it. Raises ServerUnreachable."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
    except (OSError, TimeoutError):
        raise _unreachable("cannot be reached") from None
    try:
        yield Upstream(reader, writer)
    finally:
        writer.transport.abort()  # what is still under way there is given up
        with suppress(OSError):
            await writer.wait_closed()


def _unreachable(what: str) -> ServerUnreachable:
    return ServerUnreachable(f"The server behind this proxy {what}.", "see whether it runs, and its log")
