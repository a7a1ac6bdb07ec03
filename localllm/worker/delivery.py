"""One request in a worker: its events go out under its number, and exactly one of them is the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.types import EmbeddingRequest, Request
from localllm.worker.outgoing import Outgoing

_MAX_CHOICES_TOLD = 16


class GoneAlready(Exception):
    """The request was cancelled before it was prepared: there is nothing to queue."""


class Delivery:
    """The sink of one request's events. Thread safe; `ended` is called once, with the number."""

    def __init__(self, number: int, request: Request, outgoing: Outgoing, ended: Callable[[int], None]) -> None:
        self.number = number
        self.request_id = request.request_id
        self.options = request.options
        self._n_choices = 0 if isinstance(request, EmbeddingRequest) else min(request.options.n, _MAX_CHOICES_TOLD)
        self._outgoing = outgoing
        self._ended = ended
        self._lock = threading.Lock()
        self._is_let_in = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Say whether its last event was handed over."""
        return self._is_over

    def put(self, batch: Iterable[Event]) -> None:
        """Hand events over for the next frame; what follows the terminal one is dropped."""
        with self._lock:
            self._put(list(batch))

    def let_in(self) -> None:
        """Take note that it will be queued: from now on its end comes from the runtime. Raises GoneAlready."""
        with self._lock:
            if self._is_over:
                raise GoneAlready
            self._is_let_in = True

    def cancel(self) -> bool:
        """End a request that was not let in yet, and say whether the runtime must be asked to end it instead."""
        with self._lock:
            if not self._is_let_in:
                ends = [events.Finished(choice, "cancelled") for choice in range(self._n_choices)]
                self._put([*ends, events.Usage(0, 0, {}), events.Done()])
            return self._is_let_in

    def _put(self, batch: list[Event]) -> None:
        if self._is_over or not batch:
            return
        self._is_over = isinstance(batch[-1], (events.Done, events.Error))
        self._outgoing.add(self.number, batch)
        if self._is_over:
            self._ended(self.number)
