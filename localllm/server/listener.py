"""The sockets that the app answers on, and their connections, from the first to the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState as Connections

from localllm.server.connections import Connection, Gate
from localllm.server.handshake import Handshake
from localllm.server.state import ServerState

_BACKLOG: Final = 256
_LAST_WORDS_S: Final = 0.5


class Listener:
    """Accepts connections on sockets that are bound already; uvicorn's server without its ticking loop."""

    def __init__(self, state: ServerState, app: ASGIApp) -> None:
        settings = state.settings
        self._gate = Gate(settings.limits)
        self._connections = Connections()
        self._servers: list[asyncio.Server] = []
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(settings.limits.idle_s),
            h11_max_incomplete_event_size=settings.limits.header_bytes,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )

    async def start(self, sockets: list[socket.socket]) -> None:
        """Accept from now on. Raises: OSError, ssl.SSLError where the certificate is of no use."""
        _silence_uvicorn()
        self._config.load()
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(self._config, self._connections, self._gate, loop)

        context = self._config.ssl

        def accepted() -> asyncio.Protocol:
            return connection() if context is None else Handshake(self._gate, context, connection)

        for sock in sockets:
            sock.setblocking(False)
            server = await loop.create_server(accepted, sock=sock, backlog=_BACKLOG)
            self._servers.append(server)

    def stop_accepting(self) -> None:
        """Take no more connections; those that are open stay."""
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """Close every connection: the idle ones at once, the others when their answer is out, or soon."""
        self.stop_accepting()
        for connection in list(self._connections.connections):
            connection.shutdown()
        tasks = self._connections.tasks
        if tasks:
            await asyncio.wait(set(tasks), timeout=_LAST_WORDS_S)
        for task in set(tasks):  # each still answers, that the server stops
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks), timeout=_LAST_WORDS_S)
        self._gate.drop_all()
        for connection in list(self._connections.connections):
            _abort(connection)
        await asyncio.sleep(0)  # transports close in the loop's next turn


def _abort(connection: Any) -> None:
    with contextlib.suppress(RuntimeError):
        connection.transport.abort()


def _silence_uvicorn() -> None:
    """Its loggers quote exceptions, which may hold text of a request; our own log tells what happened."""
    logger = logging.getLogger("uvicorn")
    logger.setLevel(logging.CRITICAL + 1)
    logger.propagate = False
