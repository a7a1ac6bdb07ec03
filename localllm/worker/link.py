"""The HTTP process's end of a worker's socket: requests go out, events come back, on the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.runtime.events import Event
from localllm.runtime.types import Request


class EventStream:
    """The events of one request, as they come. One reader, on the event loop's thread.

    `ipc_ms`: time that its events spent between the processes so far. `held_bytes`: about what is
    held of events that nobody took yet.
    """

    request_id: str
    ipc_ms: float
    held_bytes: int

    async def next_events(self) -> list[Event]:
        """Return all events there are, at least one; [] once the terminal one was taken."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ask for the end; the stream still ends with Done or Error. Idempotent."""
        raise NotImplementedError


class Worker:
    """A loaded model in its process. `model` is what `describe_loaded` says of it."""

    name: str
    model: Mapping[str, Any]
    pid: int

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        raise NotImplementedError

    def submit(self, request: Request) -> EventStream:
        """Start a request; a refusal comes as its only event. Raises: Unavailable where the worker is dead."""
        raise NotImplementedError

    async def call(self, verb: str, argument: Any = None, timeout_s: float = 30.0) -> Any:
        """Return the answer to `verb`. Raises: the error it failed with, TimedOut, WorkerDied, Unavailable."""
        raise NotImplementedError

    async def ping(self, timeout_s: float) -> bool:
        """Say whether the engine's thread answered in time, or is in a step that is not overdue."""
        raise NotImplementedError
