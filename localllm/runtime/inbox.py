"""How everyone else speaks to the one thread that owns the engine: by message."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from localllm.runtime.sequence import RequestRun
from localllm.runtime.stream import EventSink


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a prepared request."""

    run: RequestRun


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the request whose events go to a sink, at the next step."""

    sink: EventSink


@dataclass(frozen=True, slots=True)
class Ping:
    """Call back from the engine's thread, between two steps."""

    callback: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Close:
    """End the loop; requests at work fail."""


@dataclass(frozen=True, slots=True)
class TierReady:
    """A block that a sequence waits for was read, or cannot be."""


Message: TypeAlias = Submit | Cancel | Ping | TierReady | Close


class Inbox:
    """Messages in order of arrival; any thread puts, the engine's thread receives."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Send a message."""
        self._queue.put(message)

    @property
    def has_messages(self) -> bool:
        """Say whether something waits to be received."""
        return not self._queue.empty()

    def receive(self, wait_s: float | None) -> list[Message]:
        """Return all messages there are now; wait up to `wait_s` (None = for ever) for the first."""
        try:
            messages = [self._queue.get(wait_s != 0, wait_s)]
        except queue.Empty:
            return []
        for _ in range(self._queue.qsize()):  # what comes meanwhile waits, or a step might never begin
            messages.append(self._queue.get_nowait())
        return messages
