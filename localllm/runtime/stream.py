"""A request's events on their way to whoever reads them, by thread or by event loop; and `collect`."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from localllm import errors
from localllm.runtime import events
from localllm.runtime.events import Event, FinishReason, TokenLogprob, Usage


class EventSink(Protocol):
    """Where a request's events go. Hashed by identity; put to by the engine's thread alone, which waits for it."""

    request_id: str

    def put(self, batch: Iterable[Event]) -> None:
        """Take the events of a step, in order, at once; must neither block nor raise."""
        ...


class TokenStream:
    """The events of one request: iterate it once, plainly or with `async for`.

    The engine's thread puts, one reader takes (of several, each gets a part, and all end). Leaving
    the iteration early, or `cancel`, stops the work within one step; the stream still ends with `Done`.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[TokenStream], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: deque[Event] = deque()
        self._ready = threading.Condition()
        self._wakes: tuple[Callable[[], None], ...] = ()
        self._ended = False

    def cancel(self) -> None:
        """Ask for the end; safe from any thread and at any time."""
        self._on_cancel(self)

    def put(self, batch: Iterable[Event]) -> None:
        """Append events (the producer's side); whatever follows the terminal event is dropped."""
        with self._ready:
            if self._ended:
                return
            self._events.extend(batch)
            self._ended = bool(self._events) and _is_terminal(self._events[-1])
            self._ready.notify_all()
            wakes = self._wakes
        for wake in wakes:
            wake()

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None when `timeout_s` passed first, or the terminal one was taken already."""
        with self._ready:
            self._ready.wait_for(lambda: self._events or self._ended, timeout_s)
            return self._events.popleft() if self._events else None

    def __iter__(self) -> Iterator[Event]:
        """Yield events up to and with the terminal one."""
        complete = False
        try:
            while not complete:
                event = self.next_event()
                if event is None:
                    return
                complete = _is_terminal(event)
                yield event
        finally:
            if not complete:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events up to and with the terminal one, on the running event loop."""
        import asyncio  # a command that reads plainly does not pay for it

        loop, arrived, complete = asyncio.get_running_loop(), asyncio.Event(), False

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads there any more
                loop.call_soon_threadsafe(arrived.set)

        with self._ready:
            self._wakes = (*self._wakes, wake)
        try:
            while not complete:
                arrived.clear()
                event = self.next_event(timeout_s=0)
                if event is None:
                    if self._is_drained:
                        return
                    await arrived.wait()
                    continue
                complete = _is_terminal(event)
                yield event
        finally:
            with self._ready:
                self._wakes = tuple(other for other in self._wakes if other is not wake)
            if not complete:
                self.cancel()

    @property
    def _is_drained(self) -> bool:
        with self._ready:
            return self._ended and not self._events


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer: its text, ids, why it ended, and log-probabilities where asked for."""

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything a request gave. `seed` reproduces it; `max_tokens` is the limit that was in force."""

    choices: tuple[Choice, ...]
    usage: Usage
    seed: int
    max_tokens: int

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


def collect(stream: Iterable[Event]) -> Answer:
    """Read events to their end and return the whole answer: what non-streaming is.

    Raises: the LocalLLMError that an `Error` event tells of; LocalLLMError for events without an
    end (a stream that was read before).
    """
    texts: dict[int, list[events.Token]] = {}
    ends: dict[int, events.Finished] = {}
    seed = max_tokens = 0
    usage, complete = Usage(0, 0, {}), False
    for event in stream:
        match event:
            case events.Admitted():
                seed, max_tokens = event.seed, event.max_tokens
            case events.Token():
                texts.setdefault(event.choice, []).append(event)
            case events.Finished():
                ends[event.choice] = event
            case events.Usage():
                usage = event
            case events.Error():
                raise rebuild(event)
            case events.Done():
                complete = True
            case _:
                pass
    if not complete:
        raise errors.LocalLLMError("These events have no end: the stream was read before.", "submit the request again")
    choices = tuple(_choice(texts.get(i, []), ends[i]) for i in sorted(ends))
    return Answer(choices, usage, seed, max_tokens)


def rebuild(event: events.Error) -> errors.LocalLLMError:
    """Return the exception that an error event was made from: its kind is found by its code, which it keeps."""
    kinds = {kind.code: kind for kind in errors.LocalLLMError.__subclasses__()}
    error = kinds.get(event.code, errors.LocalLLMError)(event.message, event.hint, **event.details)
    error.code = event.code
    return error


def told(error: errors.LocalLLMError) -> events.Error:
    """Return the event that tells of an error; details that are no plain numbers or texts are left out."""
    details = {name: value for name, value in error.details.items() if isinstance(value, (str, int, float, bool))}
    index = details.get("index")
    return events.Error(error.code, error.message, error.hint, index if isinstance(index, int) else None, details)


def _choice(tokens: list[events.Token], end: events.Finished) -> Choice:
    return Choice(
        text="".join(t.text for t in tokens),
        ids=tuple(i for t in tokens for i in t.ids),
        finish_reason=end.reason,
        stop=end.stop,
        logprobs=tuple(p for t in tokens for p in t.logprobs),
    )


def _is_terminal(event: Event) -> bool:
    return isinstance(event, (events.Done, events.Error))
