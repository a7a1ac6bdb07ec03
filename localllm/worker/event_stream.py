"""The events of one request, read on the event loop as they come from its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.worker.protocol import event_bytes


class EventStream:
    """One reader, on the event loop's thread.

    `ipc_ms`: time that its events spent between the processes so far. `held_bytes`: about what is
    held of events that nobody took yet. `number`: what the request is called on the wire.
    """

    def __init__(self, request_id: str, number: int, on_cancel: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.number = number
        self.ipc_ms = 0.0
        self.held_bytes = 0
        self.has_ended = False
        self._on_cancel = on_cancel
        self._is_cancelled = False
        self._pending: list[Event] = []
        self._ready = asyncio.Event()

    async def next_events(self) -> list[Event]:
        """Return all events there are, at least one; [] once the terminal one was taken."""
        while not self._pending:
            if self.has_ended:
                return []
            self._ready.clear()
            await self._ready.wait()
        batch, self._pending = self._pending, []
        self.held_bytes = 0
        return batch

    def cancel(self) -> None:
        """Ask for the end; the stream still ends with Done or Error. Idempotent."""
        if not (self._is_cancelled or self.has_ended):
            self._is_cancelled = True
            self._on_cancel(self.number)

    def put(self, event: Event) -> None:
        """Append an event (the link's side); what follows the terminal one is dropped."""
        if self.has_ended:
            return
        self._pending.append(event)
        self.held_bytes += event_bytes(event)
        self.has_ended = isinstance(event, (events.Done, events.Error))
        self._ready.set()
