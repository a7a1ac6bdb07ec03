"""Takes requests and calls to a loaded model: prepares on threads of its own, never on the engine's or the reader's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError, QueueFull
from localllm.runtime.stream import told
from localllm.runtime.types import Request
from localllm.worker.calls import Calls, unexpected
from localllm.worker.delivery import Delivery, GoneAlready
from localllm.worker.outgoing import Outgoing
from localllm.worker.protocol import (
    BadFrame,
    Call,
    Cancel,
    Happened,
    Result,
    Submit,
    event_to_wire,
    failure,
    request_of,
)

if TYPE_CHECKING:
    from localllm.runtime.service import Service

_N_PREPARING = 2


class Desk:
    """Hands frames on to a service. `take` is for the thread that reads the socket."""

    def __init__(self, service: Service, outgoing: Outgoing, max_waiting: int) -> None:
        self._service = service
        self._calls = Calls(service)
        self._outgoing = outgoing
        self._max_preparing = max_waiting
        self._pool = ThreadPoolExecutor(_N_PREPARING, "localllm-prepare")
        self._cache_pool = ThreadPoolExecutor(1, "localllm-caches")  # what waits there delays no request
        self._writing_pool = ThreadPoolExecutor(1, "localllm-kept")  # and that delays nobody who clears them
        self._limit_pool = ThreadPoolExecutor(1, "localllm-limits")  # memory is wanted now
        self._deliveries: dict[int, Delivery] = {}
        self._lock = threading.Lock()
        self._n_preparing = 0

    def take(self, frame: Submit | Cancel | Call) -> None:
        """Do what a frame asks for, or have it done. Raises BadFrame for a request that is none, or a used number."""
        match frame:
            case Submit():
                self._submit(frame)
            case Cancel(number):
                delivery = self._deliveries.get(number)
                if delivery is not None and delivery.cancel():
                    self._service.cancel(delivery)
                self._outgoing.publish()
            case Call(verb="ping"):
                self._ping(frame)
            case Call() if self._calls.is_slow(frame):
                self._pool.submit(self._call, frame)
            case Call() if self._calls.is_about_caches(frame):
                self._cache_pool.submit(self._call, frame)
            case Call() if self._calls.is_about_writing(frame):
                self._writing_pool.submit(self._call, frame)
            case Call() if self._calls.is_limit(frame):
                self._limit_pool.submit(self._call, frame)
            case Call():
                self._call(frame)

    def _submit(self, frame: Submit) -> None:
        if frame.number in self._deliveries:
            raise BadFrame("a number that is in use")
        request = request_of(frame)
        with self._lock:
            is_full = self._n_preparing >= self._max_preparing
            self._n_preparing += not is_full
        if is_full:
            error = QueueFull(f"{self._max_preparing} requests are being prepared.", "try again in a moment")
            refuse(frame, error, self._outgoing)
            return
        delivery = Delivery(frame.number, request, self._outgoing, self._forget)
        self._deliveries[frame.number] = delivery
        self._pool.submit(self._prepare, request, delivery)

    def _prepare(self, request: Request, delivery: Delivery) -> None:
        """Prepare and queue a request; whatever refuses it becomes its last event."""
        try:
            if not delivery.is_over:
                self._service.submit(request, delivery)
        except GoneAlready:
            pass
        except BaseException as error:
            delivery.put([told(unexpected(error))])
            self._outgoing.publish()
        finally:
            with self._lock:
                self._n_preparing -= 1

    def _call(self, call: Call) -> None:
        try:
            self._outgoing.send(self._calls.answer(call))
        except BaseException as error:
            self._outgoing.send(failure(call.number, unexpected(error)))

    def _ping(self, call: Call) -> None:
        try:
            self._service.ping(lambda: self._outgoing.send(Result(call.number, {})))
        except LocalLLMError as error:
            self._outgoing.send(failure(call.number, error))

    def _forget(self, number: int) -> None:
        self._deliveries.pop(number, None)


def refuse(frame: Submit | Call, error: LocalLLMError, outgoing: Outgoing) -> None:
    """Answer a frame with an error at once."""
    if isinstance(frame, Call):
        outgoing.send(failure(frame.number, error))
    else:
        outgoing.send(Happened(time.monotonic(), [(frame.number, [event_to_wire(told(error))])]))
