"""What travels between the HTTP process and a worker, and on the private socket: one msgpack frame each.

A frame is its length (4 bytes, little-endian) and a tagged array. Each side numbers what it asks
for; answers carry the number. Peers are of the same user and version: a frame that is not one of
these ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import msgspec

from localllm.errors import LocalLLMError
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.stream import told
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, Request

VERSION = 1
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
HERE_HINT = "--no-server loads the model here"
"""What helps where a server is gone or has no room; the command line puts the verb before it that was typed."""

WireEvent: TypeAlias = list[Any]
"""An event as its index in `KINDS` and its fields in order."""

KINDS: tuple[type[Any], ...] = (
    events.Queued,
    events.Admitted,
    events.Progress,
    events.Token,
    events.Embedded,
    events.Finished,
    events.Usage,
    events.Error,
    events.Done,
)
_INDEX = {kind: index for index, kind in enumerate(KINDS)}
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in KINDS}
_TOKEN = _INDEX[events.Token]
_EVENT_BYTES = 100
_LOGPROB_BYTES = 150


class Frame(msgspec.Struct, frozen=True, array_like=True, tag_field="frame"):
    """One message."""


class Load(Frame, frozen=True, tag="load"):
    """First frame to a worker: what to load and how.

    `config`: `LoadConfig`, `runtime`: `RuntimeConfig`, both as builtins. `name`: what the model is
    called in answers. `key`: for fingerprints of requests; `lone` and `refused`: those to run alone,
    and not at all. `nice`: niceness to take on.
    """

    model: str
    name: str
    config: dict[str, Any]
    runtime: dict[str, Any]
    key: bytes
    lone: list[bytes] = []
    refused: list[bytes] = []
    nice: int = 0


class Loaded(Frame, frozen=True, tag="loaded"):
    """The worker is ready; `model` is what `worker.description.describe_loaded` says of it."""

    model: dict[str, Any]


class Failed(Frame, frozen=True, tag="failed"):
    """Number `number` failed (0: the load, or what was asked on attaching)."""

    number: int
    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class Submit(Frame, frozen=True, tag="submit"):
    """Start a request; its events come back under `number`."""

    number: int
    kind: str
    request: dict[str, Any]


class Cancel(Frame, frozen=True, tag="cancel"):
    """End request `number` at the next step."""

    number: int


class Accepted(Frame, frozen=True, tag="accepted"):
    """Request `number` was prepared; `fingerprint` is the keyed hash of what became of it."""

    number: int
    fingerprint: bytes


class Happened(Frame, frozen=True, tag="happened"):
    """The events of one step: by request number, in order. `sent_s`: time.monotonic() when it left."""

    sent_s: float
    entries: list[tuple[int, list[WireEvent]]]


class Call(Frame, frozen=True, tag="call"):
    """Ask for something that is no generation: `verb` and its argument as builtins."""

    number: int
    verb: str
    argument: Any = None


class Result(Frame, frozen=True, tag="result"):
    """The answer to a call."""

    number: int
    value: Any = None


class Log(Frame, frozen=True, tag="log"):
    """A line for the log, in words of ours: never text of a request."""

    level: str
    text: str


class Attach(Frame, frozen=True, tag="attach"):
    """First frame on the private socket: whose user, of which version, wants which model loaded how.

    `path` "" = no model, only calls. `config`: the LoadConfig that the caller would load with, {} = any.
    """

    version: int
    path: str = ""
    config: dict[str, Any] = {}


class Attached(Frame, frozen=True, tag="attached"):
    """The private socket serves that model; `model` as in `Loaded` ({} without one)."""

    model: dict[str, Any]


AnyFrame: TypeAlias = (
    Load | Loaded | Failed | Submit | Cancel | Accepted | Happened | Call | Result | Log | Attach | Attached
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyFrame)
_REQUESTS: Mapping[str, type[Request]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "embedding": EmbeddingRequest,
}


class BadFrame(Exception):
    """The bytes are no frame of ours: the connection is of no more use."""


def pack(frame: Frame) -> bytes:
    """Return a frame as bytes, its length first. Raises BadFrame where it is too large."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview) -> AnyFrame:
    """Return the frame in `body` (its length taken off). Raises BadFrame."""
    try:
        frame: AnyFrame = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from None
    return frame


class FrameReader:
    """Cuts a byte stream into frames, however it arrives."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterable[AnyFrame]:
        """Yield the frames that `data` completes. Raises BadFrame."""
        held = self._held
        held += data
        at = 0
        while len(held) - at >= LENGTH.size:
            (n_bytes,) = LENGTH.unpack_from(held, at)
            if n_bytes > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {n_bytes} bytes")
            end = at + LENGTH.size + n_bytes
            if len(held) < end:
                break
            body = bytes(held[at + LENGTH.size : end])
            at = end
            yield unpack(body)
        del held[:at]


def event_to_wire(event: Event) -> WireEvent:
    """Return an event as its kind and its fields, whatever is in them."""
    kind = type(event)
    wire = [_INDEX[kind], *(getattr(event, name) for name in _NAMES[kind])]
    if isinstance(event, events.Token) and event.logprobs:
        wire[-1] = [_logprob_to_wire(logprob) for logprob in event.logprobs]
    return wire


def event_from_wire(wire: WireEvent) -> Event:
    """Return the event. Raises BadFrame for what is none."""
    try:
        index, *values = wire
        if index == _TOKEN:
            choice, text, ids, logprobs = values
            return events.Token(choice, text, tuple(ids), tuple(_logprob_from_wire(entry) for entry in logprobs))
        event: Event = KINDS[index](*values)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise BadFrame(type(error).__name__) from None
    return event


def submit_frame(number: int, request: Request) -> Submit:
    """Return the frame that starts `request`."""
    kind = next(name for name, cls in _REQUESTS.items() if isinstance(request, cls))
    return Submit(number, kind, msgspec.to_builtins(request))


def request_of(frame: Submit) -> Request:
    """Return the request that a frame starts. Raises BadFrame."""
    try:
        return msgspec.convert(frame.request, _REQUESTS[frame.kind])
    except (msgspec.ValidationError, KeyError) as error:
        raise BadFrame(str(error)) from None


def failure(number: int, error: LocalLLMError) -> Failed:
    """Return the frame that tells of an error. Details that are no plain numbers or texts stay here."""
    event = told(error)
    return Failed(number, event.code, event.message, event.hint, dict(event.details))


def failure_event(frame: Failed) -> events.Error:
    """Return what a failure tells as an event."""
    return events.Error(frame.code, frame.message, frame.hint, details=frame.details)


def event_bytes(event: Event) -> int:
    """Return about how many bytes an event takes, held or on its way; what is small is not looked at."""
    match event:
        case events.Token():
            return _EVENT_BYTES + len(event.text) + sum(_LOGPROB_BYTES * (1 + len(p.top)) for p in event.logprobs)
        case events.Embedded():
            return _EVENT_BYTES + len(event.vector)
    return _EVENT_BYTES


def _logprob_to_wire(logprob: events.TokenLogprob) -> list[Any]:
    return [logprob.id, logprob.raw, logprob.logprob, [_logprob_to_wire(entry) for entry in logprob.top]]


def _logprob_from_wire(wire: list[Any]) -> events.TokenLogprob:
    token, raw, logprob, top = wire
    return events.TokenLogprob(token, raw, logprob, tuple(_logprob_from_wire(entry) for entry in top))
