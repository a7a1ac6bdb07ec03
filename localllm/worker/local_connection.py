"""A connection to a server's private socket, as a plain blocking one: frames out, frames in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from typing import Any

from localllm.errors import ServerUnreachable, TimedOut
from localllm.runtime.stream import rebuild
from localllm.worker import local_socket
from localllm.worker.protocol import (
    AnyFrame,
    Attach,
    Attached,
    BadFrame,
    Failed,
    Frame,
    FrameReader,
    failure_event,
    pack,
)
from localllm.worker.registry import ServerRecord

_CHUNK_BYTES = 1 << 16


class Connection:
    """One socket and its frames. `receive` is for one thread, `send` for any."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._frames = FrameReader()
        self._held: list[AnyFrame] = []
        self._sending = threading.Lock()

    @classmethod
    def open(cls, record: ServerRecord, wish: Attach, timeout_s: float) -> tuple[Connection, Mapping[str, Any]]:
        """Connect and attach; return the connection and the description of the model."""
        connection = cls(local_socket.connect(record.socket, timeout_s))
        try:
            connection.send(wish)
            answer = connection.receive()
            if isinstance(answer, Failed):
                raise rebuild(failure_event(answer))
            if not isinstance(answer, Attached):
                raise BadFrame("no Attached")
        except (OSError, BadFrame) as error:
            connection.close()
            raise ServerUnreachable(f"The server at {record.url} broke off: {error}.", "localllm ps") from None
        except BaseException:
            connection.close()
            raise
        return connection, answer.model

    def send(self, frame: Frame) -> None:
        """Send a frame whole. Raises OSError, BadFrame."""
        data = pack(frame)
        with self._sending:
            self._peer.sendall(data)

    def receive(self) -> AnyFrame:
        """Return the next frame. Raises OSError, BadFrame; ServerUnreachable at the end, TimedOut."""
        while not self._held:
            try:
                data = self._peer.recv(_CHUNK_BYTES)
            except TimeoutError:
                raise TimedOut("The server does not answer.", "localllm ps") from None
            if not data:
                raise ServerUnreachable("The server closed the connection.", "localllm ps")
            self._held.extend(self._frames.feed(data))
        return self._held.pop(0)

    def wait_forever(self) -> None:
        """From now on wait as long as it takes."""
        self._peer.settimeout(None)

    def close(self) -> None:
        """Close it; a thread that waits in `receive` comes back."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()
