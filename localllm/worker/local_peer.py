"""One connection on the private socket: what it attached to, what is at work for it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localllm.errors import LocalLLMError, ModelNotFound, Unavailable, UsageError
from localllm.runtime import events
from localllm.runtime.stream import told
from localllm.worker.description import differences, entry_to_wire
from localllm.worker.protocol import (
    HERE_HINT,
    LENGTH,
    MAX_FRAME_BYTES,
    VERSION,
    AnyFrame,
    Attach,
    Attached,
    BadFrame,
    Call,
    Cancel,
    Frame,
    Happened,
    Result,
    Submit,
    event_to_wire,
    failure,
    pack,
    request_of,
    unpack,
)

if TYPE_CHECKING:
    from localllm.worker.local_server import LocalServer
    from localllm.worker.supervisor import EventStream, ModelEntry, Worker

ATTACH_TIMEOUT_S = 10.0
"""How long a connection may take to say what it wants."""

READER_TIMEOUT_S = 30.0
"""How long a reader may take nothing before it is dropped and its work ends."""

LAST_WORDS_S = 1.0
"""How long a connection that is closed may take to read what is left for it."""

WORKER_CALLS = frozenset(
    (
        *("tokenize", "detokenize", "template", "prompt_tokens", "stats"),
        *("explain", "document", "kept", "cache_stats", "clear_cache"),
    )
)
"""The calls that are a worker's own and are relayed to it."""

LOOKING_CALLS = frozenset(("stats", "cache_stats", "clear_cache"))
"""Those of them that are no use of the model: it is unloaded as if they had not come.

Their argument may name the model: one whose file has changed or is gone is asked as well.
"""


class Peer:
    """One connection and what is at work for it."""

    def __init__(
        self, server: LocalServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._client = client
        self._model = ""
        self._streams: dict[int, EventStream | None] = {}  # None until its worker was found
        self._cancelled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False

    @property
    def n_streams(self) -> int:
        """How many requests of this connection are at work."""
        return len(self._streams)

    async def serve(self) -> None:
        """Answer frames until the peer leaves. Raises what ends the connection."""
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            first = await self._next()
        if not isinstance(first, Attach):
            raise BadFrame("no Attach")
        try:
            model = self._attach(first)
        except LocalLLMError as error:
            await self._send(failure(0, error))
            return
        await self._send(Attached(dict(model)))
        while True:
            frame = await self._next()
            match frame:
                case Submit():
                    if frame.number in self._streams:
                        raise BadFrame("a number twice")
                    self._streams[frame.number] = None
                    self._begin(self._relay(frame))
                case Cancel():
                    self._cancel(frame.number)
                case Call():
                    self._begin(self._answer(frame))
                case _:
                    raise BadFrame("not a peer's frame")

    async def cut(self) -> None:
        """Let what is at work end with an error event, then close the connection; `serve` ends with it."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_S)
        await self._hang_up()

    async def close(self) -> None:
        """Cancel what is at work and close the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hang_up()

    async def _hang_up(self) -> None:
        """Close the connection when all is sent, or soon without."""
        self._writer.close()
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._writer.wait_closed()
            except TimeoutError:
                self._writer.transport.abort()

    def _attach(self, wish: Attach) -> Mapping[str, Any]:
        """Return the description of the loaded model that is wished for, {} where none is.

        Raises: UsageError for another version or other load settings; ModelNotFound; Unavailable.
        """
        if wish.version != VERSION:
            raise UsageError(f"The server speaks version {VERSION} of the private protocol.", "localllm stop")
        if not wish.path:
            return {}
        if self._server.is_draining:
            raise _draining()
        entry = _holder(self._server.supervisor.entries(), wish.path)
        different = differences(entry.model.get("config", {}), wish.config) if wish.config else []
        if different:
            raise UsageError(f"The server holds {entry.name} with {', '.join(different)}.", "localllm ps")
        self._model = entry.name
        return {**entry.model, "is_cache_shared": self._server.is_cache_shared}

    async def _next(self) -> AnyFrame:
        (n_bytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if n_bytes > MAX_FRAME_BYTES:
            raise BadFrame(f"a frame of {n_bytes} bytes")
        return unpack(await self._reader.readexactly(n_bytes))

    async def _send(self, frame: Frame) -> None:
        """Send a frame; a peer that reads nothing for too long loses the connection."""
        self._writer.write(pack(frame))
        if self._writer.transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(READER_TIMEOUT_S):
                    await self._writer.drain()
            except TimeoutError:
                self._writer.transport.abort()
                raise

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            self._server.log("error", f"the private socket failed: {type(error).__name__}")
            self._writer.transport.abort()

    def _cancel(self, number: int) -> None:
        if number in self._streams:
            stream = self._streams[number]
            if stream is None:
                self._cancelled.add(number)
            else:
                stream.cancel()

    async def _relay(self, frame: Submit) -> None:
        """Do a request and send its events, a failure to begin it as one error event."""
        number, ending = frame.number, None
        try:
            stream = await self._submit(frame)
            while batch := await stream.next_events():
                await self._happened(number, batch)
        except LocalLLMError as error:
            ending = told(error)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            ending = told(_draining())
        finally:
            started = self._streams.pop(number, None)
            self._cancelled.discard(number)
            if started is not None:
                started.cancel()  # where it has ended, nothing happens
        if ending is not None:
            await self._happened(number, [ending])

    async def _submit(self, frame: Submit) -> EventStream:
        request = request_of(frame)
        worker = await self._worker()
        stream = worker.submit(replace(request, options=replace(request.options, client=self._client)))
        self._streams[frame.number] = stream
        if frame.number in self._cancelled:
            stream.cancel()
        return stream

    async def _worker(self) -> Worker:
        if self._server.is_draining:
            raise _draining()
        if not self._model:
            raise UsageError("This connection asked for no model.", "localllm ps")
        return await self._server.supervisor.worker(self._model)

    def _looked_at(self, name: str) -> Worker:
        """Return a model's worker as it is. Raises: Unavailable where there is none any more."""
        for worker in self._server.supervisor.workers():
            if worker.name == name:
                return worker
        raise Unavailable("The model is not loaded any more.", "localllm ps")

    async def _happened(self, number: int, batch: list[events.Event]) -> None:
        await self._send(Happened(time.monotonic(), [(number, [event_to_wire(event) for event in batch])]))

    async def _answer(self, call: Call) -> None:
        try:
            answer: Frame = Result(call.number, await self._called(call))
        except LocalLLMError as error:
            answer = failure(call.number, error)
        await self._send(answer)

    async def _called(self, call: Call) -> Any:
        supervisor = self._server.supervisor
        match call.verb:
            case "ps":
                return [entry_to_wire(entry) for entry in supervisor.entries()]
            case "stop":
                self._server.log("info", "asked to stop over the private socket")
                self._server.on_stop()
                return {"pid": os.getpid()}
            case "load":
                return entry_to_wire(await supervisor.load(_name_of(call.argument)))
            case "unload":
                return entry_to_wire(await supervisor.unload(_name_of(call.argument)))
            case verb if verb in LOOKING_CALLS:
                worker = self._looked_at(self._model if call.argument is None else _name_of(call.argument))
                return await worker.call(verb)
            case verb if verb in WORKER_CALLS:
                return await (await self._worker()).call(verb, call.argument)
            case _:
                raise UsageError("There is no such call.", "localllm ps")


def _holder(entries: list[ModelEntry], path: str) -> ModelEntry:
    """Return the entry that is ready with the file at `path`, as it is now. Raises ModelNotFound."""
    for entry in entries:
        if entry.state.value == "ready" and entry.model and not entry.is_changed:
            with contextlib.suppress(OSError):
                if os.path.samefile(entry.path, path):
                    return entry
    raise ModelNotFound("The server does not hold that model.", "localllm ps")


def _name_of(argument: Any) -> str:
    name = argument.get("name") if isinstance(argument, dict) else None
    if not isinstance(name, str):
        raise UsageError("The call needs the name of a model.", "localllm ps")
    return name


def _draining() -> Unavailable:
    return Unavailable("The server is stopping.", HERE_HINT, code="draining")
