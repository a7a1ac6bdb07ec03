"""What a worker sends: the events of a step as one frame, without the engine ever waiting for the reader.

Whoever publishes writes to the socket itself while that takes the bytes at once; what it does not
take is left to a thread that waits. Events that come meanwhile join the next frame.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from localllm.runtime.events import Embedded, Event, Token
from localllm.worker.protocol import Frame, Happened, WireEvent, event_to_wire, pack

_FRAME_BYTES = 1 << 20  # about where events go on in a further frame: far below what a frame may be
_EVENT_BYTES = 64
_LOGPROB_BYTES = 48


class Outgoing:
    """The sending side of one socket. Thread safe; frames leave in the order in which they were handed in.

    Owns one thread, asleep while the peer keeps up. A peer that is gone is no error here: nothing
    is sent any more (whoever reads from the socket learns of its end).
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._blocked = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._events: dict[int, list[WireEvent]] = {}
        self._n_event_bytes = 0
        self._packed: deque[memoryview] = deque()
        self._is_gone = False
        threading.Thread(target=self._write_blocked, name="localllm-writer", daemon=True).start()

    def add(self, number: int, batch: Iterable[Event]) -> None:
        """Keep events of a request for the next `publish`."""
        wires, n_bytes = [], 0
        for event in batch:
            wires.append(event_to_wire(event))
            n_bytes += _size_of(event)
        with self._lock:
            if self._n_event_bytes > _FRAME_BYTES:
                self._pack_events()
            self._events.setdefault(number, []).extend(wires)
            self._n_event_bytes += n_bytes

    def publish(self) -> None:
        """Send what was added as one frame."""
        with self._lock:
            self._send()

    def send(self, frame: Frame) -> None:
        """Send a frame, after everything that was added before. Raises BadFrame where it is too large."""
        data = pack(frame)
        with self._lock:
            self._pack_events()
            self._packed.append(memoryview(data))
            self._send()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything has left, or the peer has; say whether that was in time."""
        with self._lock:
            self._send()
            return self._emptied.wait_for(lambda: self._is_gone or not (self._packed or self._events), timeout_s)

    def _send(self) -> None:
        """Write what the socket takes at once; the rest is the thread's. Needs the lock."""
        if not self._packed:
            self._pack_events()
        while self._packed and not self._is_gone:
            data = self._packed[0]
            try:
                n_sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                self._blocked.notify()
                return
            except OSError:
                self._is_gone = True
                break
            if n_sent < len(data):
                self._packed[0] = data[n_sent:]
                continue
            self._packed.popleft()
            if not self._packed:
                self._pack_events()
        if self._is_gone:
            self._packed.clear()
            self._events.clear()
            self._n_event_bytes = 0
        self._emptied.notify_all()

    def _pack_events(self) -> None:
        """Make one frame of the events there are. Needs the lock."""
        if self._events:
            frame = Happened(time.monotonic(), list(self._events.items()))
            self._events = {}
            self._n_event_bytes = 0
            self._packed.append(memoryview(pack(frame)))

    def _write_blocked(self) -> None:
        while True:
            with self._lock:
                self._blocked.wait_for(lambda: self._packed)
            waiter = select.poll()
            waiter.register(self._socket, select.POLLOUT)
            with contextlib.suppress(OSError):
                waiter.poll()
            with self._lock:
                self._send()


def _size_of(event: Event) -> int:
    """Return about how many bytes an event takes; what is small is not looked at."""
    if isinstance(event, Token):
        return _EVENT_BYTES + len(event.text) + sum(_LOGPROB_BYTES * (1 + len(p.top)) for p in event.logprobs)
    return _EVENT_BYTES + (len(event.vector) if isinstance(event, Embedded) else 0)
