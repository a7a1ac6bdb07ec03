"""The server's private Unix socket: what `run`, `chat`, `ps` and `stop` of the same user talk to.

A connection begins with `Attach`. Requests are relayed to the worker that holds the model, their
events relayed back; the calls `ps`, `stop`, `load` and `unload` are answered here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.worker import local_socket, registry
from localllm.worker.local_peer import Peer
from localllm.worker.protocol import BadFrame

if TYPE_CHECKING:
    from localllm.worker.supervisor import Supervisor

MAX_CONNECTIONS = 64
LAST_WORDS_S = 1.0
"""How long the connections that are closed may take to end."""


class LocalServer:
    """Listens at `path` for this user's own commands. Lives in the supervisor's event loop.

    `on_stop`: begins the drain, as a first SIGTERM does. `log`: called with a level and a line.
    `is_cache_shared`: whether what is computed for this socket is found by HTTP clients, and the other way.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        path: Path,
        on_stop: Callable[[], None],
        log: Callable[[str, str], None] = lambda level, text: None,
        *,
        is_cache_shared: bool = True,
    ) -> None:
        self.supervisor = supervisor
        self.path = path
        self.on_stop = on_stop
        self.log = log
        self.is_cache_shared = is_cache_shared
        self.is_draining = False
        self._server: asyncio.Server | None = None
        self._registration: registry.Registration | None = None
        self._inode: tuple[int, int] = (0, 0)
        self._peers: dict[Peer, asyncio.Task[None]] = {}
        self._n_connections = 0

    @property
    def n_streams(self) -> int:
        """How many requests of this socket are at work."""
        return sum(peer.n_streams for peer in self._peers)

    async def start(self, url: str) -> None:
        """Listen, and tell the user's other commands so. Raises UsageError where that cannot be."""
        if self.path.parent == registry.runtime_folder():
            registry.ensure_folder()
        listener = local_socket.bind(self.path)
        facts = os.stat(self.path)
        self._inode = (facts.st_dev, facts.st_ino)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener)
        try:
            self._registration = registry.register(url, self.path)
        except BaseException:
            await self.close()
            raise

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those at work go on."""
        self.is_draining = True

    async def close(self) -> None:
        """End every connection (what is at work gets an error event) and leave no file. Idempotent."""
        self.begin_drain()
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        if self._server is not None:
            self._server.close()
            self._server = None
            self._remove_socket()
        tasks = list(self._peers.values())
        await asyncio.gather(*(peer.cut() for peer in list(self._peers)))
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._n_connections += 1
        peer = Peer(self, reader, writer, f"local:{self._n_connections}")
        if task is None or len(self._peers) >= MAX_CONNECTIONS or not _is_ours(writer):
            writer.close()
            return
        self._peers[peer] = task
        try:
            await peer.serve()
        except (BadFrame, OSError, asyncio.IncompleteReadError, TimeoutError):
            return  # the peer is gone, or of no use
        finally:
            del self._peers[peer]
            await peer.close()

    def _remove_socket(self) -> None:
        with contextlib.suppress(OSError):
            facts = os.lstat(self.path)
            if (facts.st_dev, facts.st_ino) == self._inode:
                self.path.unlink()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("socket")
    return peer is not None and local_socket.is_same_user(peer)
