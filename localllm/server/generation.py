"""The one way from a generation request to its answer, whole or as a stream, for every dialect.

The first events decide: a refusal becomes a plain HTTP error, anything else begins the answer. A client
that goes ends the work; so does a server that stops, which tells its streams why.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from localllm.errors import LocalLLMError, Unavailable
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.stream import Answer, collect, rebuild
from localllm.runtime.types import Request
from localllm.server import sse
from localllm.server.answers import TIERS, Costs
from localllm.server.body import ClientGone, until_gone
from localllm.server.errors import error_event
from localllm.server.merged import MergedStream, Stream
from localllm.server.record import RequestRecord
from localllm.server.replies import send_body
from localllm.server.security import Headers
from localllm.server.state import ServerState, record_of

if TYPE_CHECKING:
    from localllm.worker.supervisor import Worker

_NO_USAGE: Final = events.Usage(0, 0, {})


class WholeAnswer(Protocol):
    """Makes the JSON body of an answer that is not streamed."""

    def __call__(self, answer: Answer, costs: Costs) -> dict[str, Any]:
        """Return the body."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What a dialect made of a body.

    `requests`: one a prompt; choices are counted through them. `chunks` encode a stream, None = none is
    wanted; `whole` makes the other form. `headers` are added to the answer. `asked_tokens`: the limit that
    the client gave. `is_detailed`: all times are told; `has_progress`: prefill too.
    """

    requests: Sequence[Request]
    chunks: sse.Chunks | None
    whole: WholeAnswer
    headers: Mapping[str, str]
    asked_tokens: int | None
    is_detailed: bool
    has_progress: bool


async def respond(scope: Scope, receive: Receive, send: Send, state: ServerState, worker: Worker, job: Job) -> None:
    """Submit the job's requests and answer with what comes.

    Raises: the error of a request that failed before the answer began; ClientGone.
    """
    record = record_of(scope)
    record.model, record.is_stream = worker.name, job.chunks is not None
    stream = _submit(worker, job)
    scope["state"]["backlog"] = lambda: stream.held_bytes
    work = _Work(stream, send, state, job, record)
    watcher = asyncio.ensure_future(work.watch(receive))
    state.cuts.add(work.cut)
    try:
        await (work.answer_whole() if job.chunks is None else work.answer_as_stream(job.chunks))
    finally:
        state.cuts.discard(work.cut)
        watcher.cancel()
        work.end()


def _submit(worker: Worker, job: Job) -> Stream:
    """Start every request of a job, or none."""
    streams: list[Stream] = []
    try:
        for request in job.requests:
            streams.append(worker.submit(request))
    except LocalLLMError:
        for stream in streams:
            stream.cancel()
        raise
    return MergedStream.of(streams, job.requests)


class _Work:
    """One job at work: reads its events, writes its answer. Belongs to the task that answers."""

    def __init__(self, stream: Stream, send: Send, state: ServerState, job: Job, record: RequestRecord) -> None:
        self._stream = stream
        self._send = send
        self._job = job
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._silence_s = state.settings.limits.silence_s
        self._submitted_s = self._loop.time()
        self._sent_s = self._submitted_s
        self._admitted: events.Admitted | None = None
        self._queue_ms = 0.0
        self._progress: events.Progress | None = None
        self._usage = _NO_USAGE
        self._n_open = sum(request.options.n for request in job.requests)
        self._has_all = False
        self._cut: LocalLLMError | None = None
        self._is_gone = False
        self._is_ended = False
        self._has_started = False
        self._has_text = False
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Future[None] | None = None

    def cut(self, error: LocalLLMError) -> None:
        """End the work from outside: the answer becomes this error, or ends with it."""
        self._cut = self._cut or error
        self._stream.cancel()

    async def watch(self, receive: Receive) -> None:
        """End the work when the client goes."""
        await until_gone(receive)
        if not self._is_ended:
            self._is_gone = True
            self._stream.cancel()

    def end(self) -> None:
        """Leave nothing at work or waiting. Idempotent."""
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()
        self._record.ipc_ms = self._stream.ipc_ms
        if not self._has_all:
            self._stream.cancel()

    async def answer_whole(self) -> None:
        """Read all events, then send one JSON body."""
        seen: list[Event] = []
        while batch := await self._next():
            for event in batch:
                if isinstance(event, events.Admitted):
                    self._note_admission(event)
                elif isinstance(event, events.Error):
                    raise self._reason(rebuild(event))
                elif isinstance(event, events.Finished) and event.reason != "cancelled":
                    self._n_open -= 1
            seen += batch
        if self._n_open:
            raise self._reason(_stopped())
        answer = collect(seen)
        self._usage = answer.usage
        body = msgspec.json.encode(self._job.whole(answer, self._costs()))
        self._is_ended = True
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._headers(),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_body(self._send, body)

    async def answer_as_stream(self, chunks: sse.Chunks) -> None:
        """Send each batch of events as it comes."""
        self._timer = self._loop.call_later(self._silence_s, self._silent_for_long, chunks)
        parts: list[bytes] = []
        while batch := await self._next():
            error = self._take(batch, chunks, parts)
            if error is not None:
                return await self._fail(error, parts)
            if parts:
                await self._write(chunks, parts)
                parts.clear()
        if self._n_open:
            return await self._fail(_stopped(), parts)
        return await self._write(chunks, [chunks.costs(self._costs()), sse.DONE], is_last=True)

    async def _next(self) -> list[Event]:
        batch = await self._stream.next_events()
        if batch:
            self._record.see(batch, time.monotonic())
            self._has_all = isinstance(batch[-1], (events.Done, events.Error))
        return batch

    def _reason(self, error: LocalLLMError) -> Exception:
        """Return why the work ended early: the client went, the server cut it, or what the engine says."""
        return ClientGone() if self._is_gone else self._cut or error

    def _take(self, batch: Sequence[Event], chunks: sse.Chunks, parts: list[bytes]) -> LocalLLMError | None:
        """Append the chunks of events to `parts`; return the error that one of them tells of."""
        for event in batch:
            kind = type(event)
            if kind is events.Token:
                self._has_text = True
                parts.append(chunks.token(event))  # type: ignore[arg-type]
            elif isinstance(event, events.Finished):
                if event.reason != "cancelled":
                    self._n_open -= 1
                    parts.append(chunks.finished(event))
            elif isinstance(event, events.Admitted):
                self._note_admission(event)
                chunks.admitted(event.prompt_tokens)
                if self._loop.time() - self._submitted_s >= self._silence_s:
                    parts.append(sse.comment("at work"))
            elif isinstance(event, events.Progress):
                self._progress = event
                if self._job.has_progress and self._admitted is not None:
                    elapsed_ms = (self._loop.time() - self._submitted_s) * 1000 - self._queue_ms
                    n_cached = sum(self._admitted.cached_tokens.values())
                    parts.append(chunks.progress(event, n_cached, elapsed_ms))
            elif isinstance(event, events.Usage):
                self._usage = event
            elif isinstance(event, events.Error):
                return rebuild(event)
        return None

    async def _write(self, chunks: sse.Chunks, parts: list[bytes], *, is_last: bool = False) -> None:
        """Send parts as one write; before the first, the headers and what each choice begins with."""
        async with self._writing:
            if not self._has_started:
                self._has_started = True
                headers = [*sse.HEADERS, *self._headers()]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                parts = [chunks.first(), *parts]
            self._is_ended = is_last
            self._sent_s = self._loop.time()
            body = b"".join(parts)
            if body or is_last:
                await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _fail(self, error: LocalLLMError, parts: list[bytes]) -> None:
        """End with an error: a plain one where nothing was sent yet, else the stream's last event."""
        reason = self._reason(error)
        if not self._has_started or not isinstance(reason, LocalLLMError):
            raise reason
        self._record.error = reason.code
        async with self._writing:
            self._is_ended = True
            body = b"".join(parts) + error_event(reason)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _silent_for_long(self, chunks: sse.Chunks) -> None:
        """Keep the line alive: headers once work began, then comments. Costs nothing while tokens flow."""
        wait_s = self._sent_s + self._silence_s - self._loop.time()
        if wait_s <= 0.001:
            wait_s = self._silence_s
            is_free = self._ping is None or self._ping.done()
            if self._admitted is not None and is_free and not self._writing.locked():
                self._ping = asyncio.ensure_future(self._keep_alive(chunks))
        self._timer = self._loop.call_later(wait_s, self._silent_for_long, chunks)

    async def _keep_alive(self, chunks: sse.Chunks) -> None:
        progress = self._progress
        is_prefill = progress is not None and not self._has_text
        text = f"prefill {progress.done_tokens}/{progress.total_tokens}" if is_prefill and progress else "still at work"
        with contextlib.suppress(RuntimeError):  # the answer ended meanwhile
            if not self._is_ended:
                await self._write(chunks, [sse.comment(text)])

    def _note_admission(self, event: events.Admitted) -> None:
        if self._admitted is None:
            self._queue_ms = (self._loop.time() - self._submitted_s) * 1000
        self._admitted = event

    def _headers(self) -> Headers:
        headers = [(name.encode(), value.encode()) for name, value in self._job.headers.items()]
        admitted = self._admitted
        if admitted is not None:
            n_cached = sum(admitted.cached_tokens.values())
            queue_ms = self._usage.timings_ms.get("queue", self._queue_ms)
            headers.append((b"x-localllm-cached-tokens", b"%d" % n_cached))
            tiers = ", ".join(f"{tier}={admitted.cached_tokens.get(tier, 0)}" for tier in TIERS)
            headers.append((b"x-localllm-cached-by-tier", tiers.encode()))
            headers.append((b"x-localllm-queue-ms", b"%.1f" % queue_ms))
            if self._job.asked_tokens is not None and admitted.max_tokens < self._job.asked_tokens:
                headers.append((b"x-localllm-max-tokens", b"%d" % admitted.max_tokens))
        return headers

    def _costs(self) -> Costs:
        limit = self._admitted.max_tokens if self._admitted is not None else 0
        job = self._job
        return Costs(self._usage, limit, job.asked_tokens, self._stream.ipc_ms, job.is_detailed)


def _stopped() -> LocalLLMError:
    return Unavailable("The model was stopped meanwhile.", "try again in a moment")
