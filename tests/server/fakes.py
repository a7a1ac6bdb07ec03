"""A supervisor, its workers and their streams without processes: a Service over the fake engine, in this one.

And `serving`: the whole app on a port of its own, on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from localllm.errors import LocalLLMError, ModelNotFound, Unavailable, UsageError
from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.service import Service
from localllm.runtime.stream import told
from localllm.runtime.types import ChatRequest, CompletionRequest, Request
from localllm.server.request_log import RequestLog
from localllm.server.state import ServerSettings, ServerState
from localllm.worker.calls import Calls
from localllm.worker.lifecycle import ModelEntry, ModelState
from localllm.worker.protocol import Call
from tests.fake_engine import FakeEngine, fake_service


class FakeStream:
    """An EventStream whose events a thread, or a test, puts."""

    def __init__(self, request_id: str, on_cancel: Callable[[], None] = lambda: None) -> None:
        self.request_id = request_id
        self.ipc_ms = 0.5
        self.n_cancels = 0
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def held_bytes(self) -> int:
        return 100 * len(self._events)

    def put(self, batch: Sequence[Event]) -> None:
        """Append events; on the loop's thread."""
        self._events += batch
        self._arrived.set()

    def put_from_thread(self, batch: Sequence[Event]) -> None:
        """Append events; from any other thread."""
        try:
            self._loop.call_soon_threadsafe(self.put, batch)
        except RuntimeError:  # the loop was closed
            return

    async def next_events(self) -> list[Event]:
        if self._ended:
            return []
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        batch, self._events = self._events, []
        self._ended = isinstance(batch[-1], (events.Done, events.Error))
        return batch

    def cancel(self) -> None:
        self.n_cancels += 1
        self._on_cancel()


class FakeWorker:
    """A worker over a Service of this process. `fails`: verbs (or "submit") and what they fail with."""

    def __init__(self, name: str, service: Service, *, model: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.service = service
        self.model: Mapping[str, Any] = {**described(name, service), **(model or {})}
        self.pid = 4242
        self.is_alive = True
        self.answers_ping = True
        self.fails: dict[str, LocalLLMError] = {}
        self.requests: list[Request] = []
        self.streams: list[FakeStream] = []
        self.calls: list[tuple[str, Any]] = []

    def submit(self, request: Request) -> FakeStream:
        if not self.is_alive:
            raise Unavailable("The worker is dead.", "try again in a moment", retry_after_s=1.0)
        self.requests.append(request)
        source = _Source(self.service)
        stream = FakeStream(request.request_id, source.cancel)
        self.streams.append(stream)
        if "submit" in self.fails:
            stream.put([told(self.fails["submit"])])
        else:
            threading.Thread(target=source.pump, args=(request, stream), daemon=True).start()
        return stream

    async def call(self, verb: str, argument: Any = None, timeout_s: float = 30.0) -> Any:
        self.calls.append((verb, argument))
        if verb in self.fails:
            raise self.fails[verb]
        return await asyncio.to_thread(self._call, verb, argument or {})

    def _call(self, verb: str, argument: Mapping[str, Any]) -> Any:
        tokenizer = self.service.tokenizer
        match verb:
            case "ping":
                return {}
            case "stats":
                return {**self._answered(verb, None), "rss_bytes": 1_000_000}
            case "tokenize":
                tokens = tokenizer.encode(
                    argument["text"],
                    parse_special=argument.get("parse_special", False),
                    add_bos=argument.get("add_bos", False),
                )
                pieces = [list(tokenizer.piece(token)) for token in tokens]
                return {"tokens": tokens, **({"pieces": pieces} if argument.get("with_pieces") else {})}
            case "detokenize":
                for token in argument["tokens"]:
                    if not 0 <= token < tokenizer.vocabulary.n_vocab:
                        raise UsageError("a token is not an id of this vocabulary", field="tokens")
                return {"text": tokenizer.decode(argument["tokens"])}
            case "prompt_tokens" | "template":
                kinds: dict[str, Any] = {"chat": ChatRequest, "completion": CompletionRequest}
                request = msgspec.convert(argument["request"], kinds[argument["kind"]])
                tokens = self.service.prompt_tokens(request)
                if verb == "prompt_tokens":
                    return {"tokens": tokens}
                return {"prompt": tokenizer.decode(tokens), "n_tokens": len(tokens)}
        return self._answered(verb, argument)

    def _answered(self, verb: str, argument: Any) -> Any:
        return Calls(self.service).answer(Call(0, verb, argument)).value

    async def ping(self, timeout_s: float) -> bool:
        return self.is_alive and self.answers_ping

    def die(self) -> None:
        """End every stream as the death of a process does."""
        self.is_alive = False
        error = events.Error("worker_died", "The model's process died.", "it is being started again")
        for stream in self.streams:
            stream.put([error])


class _Source:
    """One request at a Service, pumped by a thread of its own as a worker's threads would."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._stream: Any = None
        self._cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._stream is not None:
                self._stream.cancel()

    def pump(self, request: Request, stream: FakeStream) -> None:
        try:
            source = self._service.submit(request)
        except LocalLLMError as error:
            stream.put_from_thread([told(error)])
            return
        with self._lock:
            self._stream = source
            if self._cancelled:
                source.cancel()
        while (event := source.next_event()) is not None:
            batch = [event]
            while (event := source.next_event(timeout_s=0)) is not None:
                batch.append(event)
            stream.put_from_thread(batch)


def described(name: str, service: Service) -> dict[str, Any]:
    """Return what `worker.description.describe_loaded` says of a fake model."""
    return {
        "name": name,
        "path": f"/models/{name}.gguf",
        "sha256": "f" * 64,
        "architecture": "fake",
        "quant": "Q8_0",
        "n_ctx": service.model.n_ctx,
        "n_slots": service.model.n_slots,
        "max_sequence_tokens": service.model.n_ctx,
        "n_ctx_train": 4096,
        "n_vocab": service.tokenizer.vocabulary.n_vocab,
        "n_embd": service.model.info.n_embd,
        "n_params": 1_000_000,
        "size_bytes": 2_000_000,
        "can_chat": service.can_chat,
        "takes_tools": service.takes_tools,
        "can_fill_in": service.tokenizer.vocabulary.fim_ids is not None,
        "max_embed_tokens": service.spec.max_embed_tokens,
        "sampling": {"temperature": 0.0},
        "settings": {},
        "is_deterministic": service.model.is_deterministic,
        "notes": [],
        "config": {},
    }


class FakeSupervisor:
    """The supervisor's interface over fake workers: those given are ready, `stored` names are not loaded.

    `refuses`: names, and what `worker` and `load` raise for them.
    """

    def __init__(self, *workers: FakeWorker, stored: Sequence[str] = (), aliases: Sequence[str] = ()) -> None:
        self.fakes = {worker.name: worker for worker in workers}
        self.refuses: dict[str, LocalLLMError] = {}
        self.last_used_s = 0.0
        self._states = {
            **dict.fromkeys(self.fakes, ModelState.READY),
            **dict.fromkeys(stored, ModelState.UNLOADED),
        }
        self._aliases = tuple(aliases)
        self.is_closed = False

    async def start(self) -> None:
        """Nothing is to be found."""

    async def close(self) -> None:
        self.is_closed = True
        for worker in self.fakes.values():
            worker.die()

    def entries(self) -> list[ModelEntry]:
        return [self.entry(name) for name in self._states]

    def entry(self, name: str | None) -> ModelEntry:
        first = next(iter(self._states), "")
        asked, name = name, first if not name or name in self._aliases else name
        if name not in self._states:
            raise ModelNotFound(
                f"There is no model {asked!r}.", f"ask for one of: {', '.join(self._states)}", field="model"
            )
        state, worker = self._states[name], self.fakes.get(name)
        is_ready = state is ModelState.READY and worker is not None
        return ModelEntry(
            name=name,
            aliases=self._aliases if name == first else (),
            path=Path(f"/models/{name}.gguf"),
            size_bytes=2_000_000,
            created_s=1_700_000_000,
            state=state,
            reason=str(self.refuses.get(name, "")),
            is_pinned=name == first,
            n_requests=0,
            last_used_s=self.last_used_s,
            pid=worker.pid if worker is not None and is_ready else None,
            model=worker.model if worker is not None and is_ready else {},
        )

    def set_state(self, name: str, state: ModelState) -> None:
        """Put a model into a state."""
        self._states[name] = state

    async def worker(self, name: str | None, wait_s: float = 15.0) -> FakeWorker:
        entry = self.entry(name)
        if entry.name in self.refuses:
            raise self.refuses[entry.name]
        if entry.state is not ModelState.READY:
            await self.load(entry.name)
        self.last_used_s = time.time()
        return self.fakes[entry.name]

    async def load(self, name: str | None) -> ModelEntry:
        entry = self.entry(name)
        if entry.name in self.refuses:
            raise self.refuses[entry.name]
        if entry.name not in self.fakes:
            self.fakes[entry.name] = FakeWorker(entry.name, fake_service())
        self._states[entry.name] = ModelState.READY
        return self.entry(entry.name)

    async def unload(self, name: str | None) -> ModelEntry:
        entry = self.entry(name)
        worker = self.fakes.pop(entry.name, None)
        if worker is not None:
            worker.die()
            worker.service.close()
        self._states[entry.name] = ModelState.UNLOADED
        return self.entry(entry.name)

    def workers(self) -> list[FakeWorker]:
        return [self.fakes[name] for name, state in self._states.items() if state is ModelState.READY]


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; "[DONE]" as it is."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


@dataclass(slots=True)
class Running:
    """A server at work in a thread of this process."""

    state: ServerState
    supervisor: FakeSupervisor
    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    log: io.StringIO = field(default_factory=io.StringIO)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def worker(self) -> FakeWorker:
        """The first model's worker."""
        return next(iter(self.supervisor.fakes.values()))

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> Reply:
        """Send one request on a connection of its own. A body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        sent = {} if body is None else {"content-type": "application/json"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def connect(self) -> socket.socket:
        """Return a raw connection."""
        return socket.create_connection((self.host, self.port), timeout=20)

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and return what it gives."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return once `condition` holds; fail where it does not in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.002)


def fake_supervisor(engine: FakeEngine | None = None, name: str = "fake", **service: Any) -> FakeSupervisor:
    """Return a supervisor of one ready model over a fake engine."""
    return FakeSupervisor(FakeWorker(name, fake_service(engine, **service)))


@contextmanager
def serving(
    supervisor: FakeSupervisor | None = None, settings: ServerSettings | None = None, app: Any = None
) -> Iterator[Running]:
    """Serve the app on a free loopback port until the block ends. `app`: a function of the state, None = the whole.

    The services of the fake workers are closed at the end.
    """
    from localllm.server.app import create_app
    from localllm.server.listener import Listener

    supervisor, settings = supervisor or fake_supervisor(), settings or ServerSettings()
    sock = socket.create_server((settings.host, 0))
    port = sock.getsockname()[1]
    log = io.StringIO()
    requests = RequestLog(settings.log_format, log)
    state = ServerState(replace(settings, port=port), supervisor, requests)  # type: ignore[arg-type]
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        listener = Listener(state, (app or create_app)(state))
        await listener.start([sock])
        started.set()
        await stop.wait()
        await listener.close()

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(main())
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
            started.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield Running(state, supervisor, settings.host, port, loop, log)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        for worker in supervisor.fakes.values():
            worker.service.close()
        requests.close()
        sock.close()
        assert not thread.is_alive(), "the server did not end"
