"""Many questions at once over one connection to a server's private socket, each answered under its number."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import LocalLLMError, ServerUnreachable
from localllm.runtime import events
from localllm.runtime.stream import TokenStream, rebuild
from localllm.runtime.types import Request
from localllm.worker.local_connection import Connection
from localllm.worker.protocol import (
    HERE_HINT,
    AnyFrame,
    BadFrame,
    Call,
    Cancel,
    Failed,
    Frame,
    Happened,
    Result,
    event_from_wire,
    failure_event,
    submit_frame,
)


class Exchange:
    """What is asked of one server, and a thread that hands out what it answers. Thread safe. `url`: the server's."""

    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._url = url
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._death: LocalLLMError | None = None
        self._reader = threading.Thread(target=self._read, name="localllm-server", daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Say whether what is asked will be answered."""
        return self._death is None

    def submit(self, request: Request) -> TokenStream:
        """Hand a request to the server; its events come through the stream.

        Returns when the server took it. Raises: what refused it, as in process; ServerUnreachable.
        """
        number = next(self._numbers)
        stream = TokenStream(request.request_id, lambda _: self._send_if_alive(Cancel(number)))
        waiting = self._ask(number, submit_frame(number, request), _Waiting(stream))
        if waiting.failure is not None:
            raise waiting.failure
        return stream

    def call(self, verb: str, argument: Any) -> Any:
        """Return the answer to a verb. Raises: the failure that the server tells of; ServerUnreachable."""
        number = next(self._numbers)
        waiting = self._ask(number, Call(number, verb, argument), _Waiting(None))
        if waiting.failure is not None:
            raise waiting.failure
        return waiting.value

    def close(self) -> None:
        """Leave the server; what waits for it ends. Idempotent."""
        self._end(ServerUnreachable("The connection to the server was closed.", "start again"))
        self._connection.close()

    def _ask(self, number: int, frame: Frame, waiting: _Waiting) -> _Waiting:
        """Send what is numbered `number` and wait for the first answer to it."""
        with self._lock:
            if self._death is not None:
                raise self._death
            self._waiting[number] = waiting
        try:
            self._send(frame)
            waiting.answered.wait()
        except BaseException:
            self._send_if_alive(Cancel(number))
            raise
        return waiting

    def _send(self, frame: Frame) -> None:
        try:
            self._connection.send(frame)
        except OSError:
            self._end(self._gone())
        except BadFrame as error:
            raise LocalLLMError(f"The request is too large for the server: {error}.", HERE_HINT) from None

    def _send_if_alive(self, frame: Frame) -> None:
        if self._death is None:
            self._send(frame)

    def _read(self) -> None:
        """Hand out what comes until the server is gone."""
        try:
            self._connection.wait_forever()
            while True:
                self._take(self._connection.receive())
        except (LocalLLMError, OSError, BadFrame):
            self._end(self._gone())

    def _take(self, frame: AnyFrame) -> None:
        match frame:
            case Happened():
                for number, wires in frame.entries:
                    self._happened(number, [event_from_wire(wire) for wire in wires])
            case Result():
                self._answered(frame.number, frame.value, None)
            case Failed():
                self._answered(frame.number, None, rebuild(failure_event(frame)))
            case _:
                raise BadFrame("not a server's frame")

    def _happened(self, number: int, batch: list[events.Event]) -> None:
        with self._lock:
            waiting = self._waiting.get(number)
            if waiting is None or waiting.stream is None or not batch:
                return
            if isinstance(batch[-1], (events.Done, events.Error)):
                del self._waiting[number]
        if isinstance(batch[0], events.Error) and not waiting.answered.is_set():
            waiting.failure = rebuild(batch[0])
        else:
            waiting.stream.put(batch)
        waiting.answered.set()

    def _answered(self, number: int, value: Any, failure: LocalLLMError | None) -> None:
        with self._lock:
            waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.value, waiting.failure = value, failure
            waiting.answered.set()

    def _end(self, death: LocalLLMError) -> None:
        """Let everything that waits for the server end. Only the first reason counts."""
        with self._lock:
            if self._death is not None:
                return
            self._death = death
            left = list(self._waiting.values())
            self._waiting.clear()
        for waiting in left:
            if waiting.answered.is_set() and waiting.stream is not None:
                waiting.stream.put([events.Error(death.code, death.message, death.hint)])
            else:
                waiting.failure = death
            waiting.answered.set()

    def _gone(self) -> ServerUnreachable:
        return ServerUnreachable(f"The server at {self._url} is gone, and with it what it was answering.", HERE_HINT)


@dataclass(slots=True)
class _Waiting:
    """Something asked: `answered` is set at the first answer; `stream` None for a call."""

    stream: TokenStream | None
    answered: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    failure: LocalLLMError | None = None
