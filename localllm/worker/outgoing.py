"""What a worker sends: the events of a step as one frame, without the engine ever waiting for the reader.

Whoever publishes writes to the socket itself while that takes the bytes at once; what it does not
take is left to a thread that waits. Events that come meanwhile join the next frame.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from localllm.runtime.events import Event
from localllm.worker.protocol import Frame, Happened, WireEvent, event_bytes, event_to_wire, pack

_FRAME_BYTES = 1 << 20  # about where events go on in a further frame: far below what a frame may be
_TURN_BYTES = 1 << 18  # at most so much is written while others wait for the lock


class Outgoing:
    """The sending side of one socket. Thread safe; frames leave in the order in which they were handed in.

    Owns one thread, asleep while the peer keeps up, until `close` or the peer's end. A peer that is
    gone is no error here: nothing is sent any more (who reads from the socket learns of its end).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._behind = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._events: dict[int, list[WireEvent]] = {}
        self._n_event_bytes = 0
        self._packed: deque[memoryview] = deque()
        self._is_behind = False  # there is more than the socket took: only the thread writes
        self._is_gone = False
        threading.Thread(target=self._catch_up, name="localllm-writer", daemon=True).start()

    def add(self, number: int, batch: Iterable[Event]) -> None:
        """Keep events of a request for the next `publish`."""
        wires, n_bytes = [], 0
        for event in batch:
            wires.append(event_to_wire(event))
            n_bytes += event_bytes(event)
        with self._lock:
            if self._n_event_bytes > _FRAME_BYTES:
                self._pack_events()
            self._events.setdefault(number, []).extend(wires)
            self._n_event_bytes += n_bytes

    def publish(self) -> None:
        """Send what was added as one frame."""
        with self._lock:
            if not self._is_behind:
                self._pack_events()
                self._send()

    def send(self, frame: Frame) -> None:
        """Send a frame, after everything that was added before. Raises BadFrame where it is too large."""
        data = memoryview(pack(frame))
        with self._lock:
            self._pack_events()
            self._packed.append(data)
            if not self._is_behind:
                self._send()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything has left, or the peer has; say whether that was in time."""
        self.publish()
        with self._lock:
            return self._emptied.wait_for(lambda: not self._packed, timeout_s)

    def close(self) -> None:
        """Send nothing more. Idempotent."""
        with self._lock:
            self._is_gone = True
            self._send()

    def _send(self) -> None:
        """Write what the socket takes at once, but not for long; the rest is the thread's. Needs the lock."""
        n_left = _TURN_BYTES
        while self._packed and not self._is_gone:
            try:
                n_sent = self._socket.send(self._packed[0][:n_left], socket.MSG_DONTWAIT) if n_left else 0
            except BlockingIOError:
                n_sent = n_left = 0
            except OSError:
                self._is_gone = True
                break
            if not n_left:
                self._is_behind = True
                self._behind.notify()
                return
            n_left -= n_sent
            self._packed[0] = self._packed[0][n_sent:]
            if not self._packed[0]:
                self._packed.popleft()
            if not self._packed:
                self._pack_events()
        self._is_behind = False
        if self._is_gone:
            self._packed.clear()
            self._behind.notify()
        self._emptied.notify_all()

    def _pack_events(self) -> None:
        """Make one frame of the events there are. Needs the lock."""
        if self._events:
            frame = Happened(time.monotonic(), list(self._events.items()))
            self._events = {}
            self._n_event_bytes = 0
            self._packed.append(memoryview(pack(frame)))

    def _catch_up(self) -> None:
        waiter = select.poll()
        waiter.register(self._socket, select.POLLOUT)
        while True:
            with self._lock:
                self._behind.wait_for(lambda: self._is_behind or self._is_gone)
                if self._is_gone:
                    return
            waiter.poll()
            with self._lock:
                self._send()
