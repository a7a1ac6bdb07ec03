"""The HTTP process's end of a worker's socket: requests go out, events come back, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm.errors import LocalLLMError, TimedOut, Unavailable, UsageError, WorkerDied
from localllm.runtime import events
from localllm.runtime.stream import rebuild, told
from localllm.runtime.types import Request
from localllm.worker.event_stream import EventStream
from localllm.worker.protocol import (
    Accepted,
    AnyFrame,
    BadFrame,
    Call,
    Cancel,
    Failed,
    Frame,
    FrameReader,
    Happened,
    Loaded,
    Log,
    Result,
    WireEvent,
    event_from_wire,
    failure_event,
    pack,
    submit_frame,
)

MAX_UNSENT_BYTES = 64 << 20
"""What may wait for a worker that does not read, before it gets no more."""

CONNECTION_ENDED, STOPPED = "its connection ended", "it was stopped"
"""Reasons of an end that the process brings about, or follows, by itself."""

_MAX_LOG_CHARS = 2000
_LOG_BURST, _LOGS_PER_S = 50, 10


class Link(asyncio.Protocol):
    """One worker's connection: numbers what is asked, hands out what comes, and ends all of it with the worker.

    `loaded`: what the worker says of its model, or the error that it could not load it for; never set
    where it dies before. `fingerprints`: of requests at work that it prepared. `n_engine_frames` and
    `n_frames` count what came, of the engine and in all.
    """

    def __init__(self, log: Callable[[str, str], None], on_end: Callable[[], None]) -> None:
        """`on_end` is called once, when nothing will come any more."""
        self.loaded: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.streams: dict[int, EventStream] = {}
        self.fingerprints: dict[int, bytes] = {}
        self.n_frames = self.n_engine_frames = 0
        self.end_reason = ""
        self.on_answer: Callable[[bool], None] = _ignore
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._on_end = on_end
        self._log = _Throttle(log)
        self._error: LocalLLMError | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._number = 0

    @property
    def is_open(self) -> bool:
        """Say whether what is sent may arrive."""
        return self._error is None and self._transport is not None

    @property
    def n_calls(self) -> int:
        """Calls without an answer yet."""
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._error is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand out the frames that `data` completes; what is none ends the link."""
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except BadFrame as error:
            self._break(f"it sent what is no frame of ours ({error})")
        except Exception as error:  # a worker's bytes never end the loop of all
            self._break(f"it sent what cannot be used ({type(error).__name__})")

    def connection_lost(self, error: Exception | None) -> None:
        """End what is open: the worker died."""
        self._break(CONNECTION_ENDED)

    def send(self, frame: Frame) -> None:
        """Send a frame, without waiting. Raises: UsageError for what no frame can hold."""
        try:
            data = pack(frame)
        except (BadFrame, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UsageError(
                f"The request cannot be sent to the model's process ({type(error).__name__}).", "send a smaller one"
            ) from None
        if self._transport is not None and self._error is None:
            self._transport.write(data)

    def submit(self, request: Request) -> EventStream:
        """Start a request. Raises: Unavailable where the worker is gone or takes nothing."""
        self._check_open()
        self._number += 1
        stream = EventStream(request.request_id, self._number, self._cancel)
        try:
            self.send(submit_frame(stream.number, request))
        except LocalLLMError as error:
            stream.put(told(error))
        else:
            self.streams[stream.number] = stream
        return stream

    def ask(self, verb: str, argument: Any = None) -> asyncio.Future[Any]:
        """Call a verb and return its answer to come. Raises: Unavailable."""
        self._check_open()
        self._number += 1
        number = self._number
        self.send(Call(number, verb, argument))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        answer.add_done_callback(lambda _: self._calls.pop(number, None))
        return answer

    async def call(self, verb: str, argument: Any, timeout_s: float) -> Any:
        """Return the answer to `verb`. Raises: what it failed with, TimedOut, WorkerDied, Unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.ask(verb, argument)
        except TimeoutError:
            raise TimedOut(
                f"The model's process did not answer `{verb}` within {timeout_s:g} s.", "try again in a moment"
            ) from None

    def end(self, error: LocalLLMError, reason: str = "") -> None:
        """End every stream with `error` and every call by it, and let go of the socket. Idempotent."""
        if self._error is not None:
            return
        self._error, self.end_reason = error, reason
        if self._transport is not None:
            self._transport.abort()
        last = told(error)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.put(last)
        for answer in list(self._calls.values()):
            if not answer.done():
                _fail(answer, error)
        self._on_end()

    def _break(self, reason: str) -> None:
        died = WorkerDied("The process that held the model died; it is being started again.", "send it again")
        self.end(died, reason)

    def _check_open(self) -> None:
        if not self.is_open:
            raise Unavailable("The process that held the model is gone.", "try again in a moment", retry_after_s=1)
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise Unavailable("The model's process takes no more requests.", "try again later", retry_after_s=5)

    def _cancel(self, number: int) -> None:
        self.send(Cancel(number))

    def _take(self, frame: AnyFrame) -> None:
        self.n_frames += 1
        match frame:
            case Happened():
                transit_ms = max(0.0, (time.monotonic() - frame.sent_s) * 1e3)
                for number, wires in frame.entries:
                    self._hand_out(number, wires, transit_ms)
            case Accepted():
                if frame.number in self.streams:
                    self.fingerprints[frame.number] = frame.fingerprint
            case Result():
                self._answer(frame.number, lambda answer: answer.set_result(frame.value))
            case Failed():
                self._take_failure(frame)
            case Loaded() if frame.model and not self.loaded.done():
                self.loaded.set_result(frame.model)
            case Log():
                self._log(frame.level, frame.text)
            case _:
                raise BadFrame(f"a frame `{type(frame).__name__}` that is not for us")

    def _hand_out(self, number: int, wires: list[WireEvent], transit_ms: float) -> None:
        self.n_engine_frames += number in self.fingerprints
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.ipc_ms += transit_ms
        for wire in wires:
            event = event_from_wire(wire)
            stream.put(event)
            if stream.has_ended:
                self._forget(number, is_good=isinstance(event, events.Done) and number in self.fingerprints)
                return

    def _take_failure(self, frame: Failed) -> None:
        event = failure_event(frame)
        if frame.number in self.streams:
            self.streams[frame.number].put(event)
            self._forget(frame.number, is_good=False)
        elif frame.number == 0 and not self.loaded.done():
            _fail(self.loaded, rebuild(event))
        else:
            self._answer(frame.number, lambda answer: _fail(answer, rebuild(event)))

    def _answer(self, number: int, give: Callable[[asyncio.Future[Any]], None]) -> None:
        answer = self._calls.get(number)
        if answer is not None and not answer.done():
            give(answer)

    def _forget(self, number: int, is_good: bool) -> None:
        del self.streams[number]
        self.fingerprints.pop(number, None)
        self.on_answer(is_good)


class _Throttle:
    """Passes a worker's log lines on, cleaned, and no more of them than a person could read."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._allowance, self._seen_s = float(_LOG_BURST), time.monotonic()

    def __call__(self, level: str, text: str) -> None:
        now_s = time.monotonic()
        self._allowance = min(_LOG_BURST, self._allowance + (now_s - self._seen_s) * _LOGS_PER_S)
        self._seen_s = now_s
        if self._allowance >= 1:
            self._allowance -= 1
            self._log(level, "".join(c if c.isprintable() else " " for c in text[:_MAX_LOG_CHARS]))


def _fail(answer: asyncio.Future[Any], error: LocalLLMError) -> None:
    """Give an error for an answer; that nobody waits for it any more is no news."""
    answer.set_exception(error)
    answer.exception()


def _ignore(is_good: bool) -> None:
    """Nobody counts answers yet."""
