"""`POST /v1/embeddings`: texts or token ids to vectors of length 1, in the order in which they were given."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import LocalLLMError, Unavailable, UsageError
from localllm.runtime import events
from localllm.runtime.stream import rebuild
from localllm.runtime.types import MAX_PRIORITY, EmbeddingRequest
from localllm.server.body import ClientGone, read, until_gone
from localllm.server.fields import Neutral, ignored_fields
from localllm.server.isolation import sender_of
from localllm.server.record import RequestRecord
from localllm.server.replies import InPieces
from localllm.server.state import ServerState, record_of

if TYPE_CHECKING:
    from localllm.worker.supervisor import EventStream, Worker

PATH: Final = "/v1/embeddings"
MAX_ANSWER_BYTES: Final = 256 << 20
"""The largest answer that is made: it is held in memory until the last vector is there."""

REFUSED: Final[Neutral] = {
    "truncate_prompt_tokens": ((), "split long inputs"),
    "truncate": ((False, "NONE"), "split long inputs"),
    "add_special_tokens": ((True,), "leave it out"),
    "normalize": ((True,), "leave it out: vectors have length 1"),
    "embd_normalize": ((2,), "leave it out: vectors have length 1"),
    "pooling": ((), "leave it out: the model's file says how"),
    "input_type": ((), "put the model's own prefix into the texts"),
    "instruction": (("",), "put it into the texts"),
}

Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
_FLOAT_CHARS: Final = 24
_BESIDE_CHARS: Final = 64


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text, texts, the token ids of a text, or those of several."""

    input: Text | Annotated[list[Text | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One input's vector: numbers, or float32, little-endian, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the route."""

    async def embed(request: Request) -> Response:
        body = await read(request.scope, request.receive, state, EmbeddingsBody)
        wanted, record = body.value, record_of(request.scope)
        headers = ignored_fields(body, REFUSED, state.settings.strict)
        inputs = inputs_of(wanted.input)
        worker = await state.supervisor.worker(wanted.model, state.settings.limits.load_wait_s)
        record.model = worker.name
        encode = encode_base64 if wanted.encoding_format == "base64" else encode_floats
        _check_size(inputs, wanted, worker, encode)
        sender = sender_of(request.scope, state.settings)
        options = replace(sender.options, priority=wanted.priority or 0)
        work = _Work(worker.submit(EmbeddingRequest(inputs, options, sender.request_id)), state, record, encode)
        content = await work.answer(request, worker.name, len(inputs))
        if record.queue_s is not None:
            headers["x-localllm-queue-ms"] = f"{record.queue_s * 1000:.1f}"
        return InPieces(content, headers=headers, media_type="application/json")

    return [Route(PATH, embed, methods=["POST"])]


def inputs_of(given: str | Sequence[str | int | Sequence[int]]) -> tuple[str | tuple[int, ...], ...]:
    """Return what is to be embedded, one entry a vector. A list of numbers is the ids of one text.

    Raises: UsageError where texts and ids are mixed.
    """
    if isinstance(given, str):
        return (given,)
    kinds = {type(entry) for entry in given}
    if len(kinds) > 1:
        raise UsageError("The list mixes texts and token ids.", "send one kind at a time", field="input")
    if kinds == {int}:
        return (tuple(given),)  # type: ignore[arg-type]
    return tuple(entry if isinstance(entry, str) else tuple(entry) for entry in given)  # type: ignore[arg-type]


def encode_base64(vector: bytes) -> bytes:
    """Return a vector (float32, little-endian) as the JSON of its base64."""
    return b'"' + base64.b64encode(vector) + b'"'


def encode_floats(vector: bytes) -> bytes:
    """Return a vector (float32, little-endian) as a JSON list of numbers."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return msgspec.json.encode(numbers.tolist())


def _check_size(
    inputs: Sequence[Any], wanted: EmbeddingsBody, worker: Worker, encode: Callable[[bytes], bytes]
) -> None:
    """Refuse a dimension that the model does not have, and inputs whose vectors would not fit in memory."""
    n_embd = int(worker.model["n_embd"])
    if wanted.dimensions is not None and wanted.dimensions != n_embd:
        raise UsageError(
            f"This model's vectors have {n_embd} dimensions, no other number.",
            "leave dimensions out",
            field="dimensions",
            n_embd=n_embd,
        )
    each_bytes = _BESIDE_CHARS + n_embd * (6 if encode is encode_base64 else _FLOAT_CHARS)
    limit = MAX_ANSWER_BYTES // each_bytes
    if len(inputs) > limit:
        raise UsageError(
            f"The vectors of {len(inputs)} inputs make too large an answer; {limit} fit in one.",
            "send them in parts",
            field="input",
            limit=limit,
        )


class _Work:
    """One request at work. Vectors are encoded as they come; a client that goes, or a stop, ends it."""

    def __init__(
        self, stream: EventStream, state: ServerState, record: RequestRecord, encode: Callable[[bytes], bytes]
    ) -> None:
        self._stream = stream
        self._state = state
        self._record = record
        self._encode = encode
        self._vectors: list[bytes] = []
        self._is_gone = False
        self._error: LocalLLMError | None = None

    async def answer(self, request: Request, model: str, n_inputs: int) -> bytes:
        """Return the answer's JSON. Raises: the error that the request failed with; ClientGone."""
        watcher = asyncio.ensure_future(self._watch(request))
        self._state.cuts.add(self.cut)
        try:
            while batch := await self._stream.next_events():
                await self._take(batch)
        finally:
            self._state.cuts.discard(self.cut)
            watcher.cancel()
            self._stream.cancel()
            self._record.ipc_ms = self._stream.ipc_ms
        if self._is_gone:
            raise ClientGone
        if self._error is not None:
            raise self._error
        if len(self._vectors) != n_inputs:  # cancelled by another hand
            raise Unavailable("The model was stopped meanwhile.", "try again in a moment")
        n_tokens = self._record.n_prompt_tokens
        usage = EmbeddingsUsage(prompt_tokens=n_tokens, total_tokens=n_tokens)
        tail = b'],"model":%b,"usage":%b}' % (msgspec.json.encode(model), msgspec.json.encode(usage))
        return b'{"object":"list","data":[' + b",".join(self._vectors) + tail

    def cut(self, error: LocalLLMError) -> None:
        """End the work from outside, with this error."""
        self._error = self._error or error
        self._stream.cancel()

    async def _take(self, batch: Sequence[events.Event]) -> None:
        self._record.see(batch, time.monotonic())
        for event in batch:
            if isinstance(event, events.Embedded):
                vector = self._encode(event.vector)
                self._vectors.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (event.index, vector))
                await asyncio.sleep(0)  # a batch may hold many vectors: others have their turn between them
            elif isinstance(event, events.Error):
                self._error = self._error or rebuild(event)

    async def _watch(self, request: Request) -> None:
        await until_gone(request.receive)
        self._is_gone = True
        self._stream.cancel()
