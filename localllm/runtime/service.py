"""The one interface to a loaded model, in process: submit a request, read its events.

`localllm.open` returns it; the command line uses nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from localllm.errors import QueueFull, Unavailable
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.answers import AnswerMemory
from localllm.runtime.caches import Caches
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.draft.base import Drafter
from localllm.runtime.engine import Engine, EngineSpec
from localllm.runtime.events import Event
from localllm.runtime.hooks import NO_HOOKS, Hooks
from localllm.runtime.inbox import Cancel, Ping, Submit, TierReady
from localllm.runtime.kv.explain import CacheStats, Cleared, Explanation, Warmed
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.loaded_model import LoadedModel
from localllm.runtime.loop import EngineLoop
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.prepare import ModelFacts, options_from, prepare, recollection_of
from localllm.runtime.prompts import encode_prompt, render_prompt
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.stream import Answer, EventSink, TokenStream, collect, rebuild, told
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationRequest, Message, Request
from localllm.runtime.warming import document_tokens, warm

T = TypeVar("T")
_KEEPING_S = 60.0  # that an answer waits for what is still to be written: gigabytes, of a long document
_LOOK_S = 0.1  # between looks whether the engine's thread is there


def _answer(asked: Future[T], question: Callable[[], T]) -> None:
    """Answer a question; that it fails is the asker's news, not the thread's."""
    try:
        asked.set_result(question())
    except BaseException as error:
        asked.set_exception(error)


class Service:
    """A loaded model at work. Thread safe; close it, or use it as a context manager."""

    def __init__(
        self,
        model: LoadedModel,
        facts: ModelFacts,
        engine: Engine,
        config: RuntimeConfig = RuntimeConfig(),
        drafter: Drafter | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        engine = hooks.wrap_engine(engine)
        self.model = model
        self._facts = facts
        self._config = config
        self._spec = engine.spec
        cost = StepCost()
        self._tiers = Tiers(
            config.tiers,
            spec=engine.spec,
            model_name=model.name,
            can_write_disk=model.sha256 is not None,
            wake=lambda: self._loop.inbox.put(TierReady()),
        )
        # With it, what a prompt becomes depends on what was answered before: not where answers must be equal.
        self._answers = None if engine.spec.cut_tokens else AnswerMemory(facts.tokenizer)
        self._scheduler = Scheduler(engine.spec, config, cost, hooks.published, self._tiers)
        self._loop = EngineLoop(engine, self._scheduler, cost, drafter, hooks.watch)
        self._caches = Caches(facts, engine.spec, self._tiers, self._scheduler, self._answers, self._on_engine)
        self._gate = hooks.gate
        self._admission = threading.Lock()
        self._n_submitted = 0
        self._preparing: dict[EventSink, bool] = {}  # whether it was cancelled meanwhile
        self._loop.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; may be called from any thread."""
        return self._facts.tokenizer

    @property
    def spec(self) -> EngineSpec:
        """What the engine can do."""
        return self._spec

    @property
    def can_chat(self) -> bool:
        """Say whether there is a chat template to render conversations with."""
        return self._facts.template is not None

    @property
    def takes_tools(self) -> bool:
        """Say whether the chat template shows a request's tools to the model."""
        return self._facts.template is not None and self._facts.template.takes_tools

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        return self._loop.is_alive

    @overload
    def submit(self, request: Request) -> TokenStream: ...

    @overload
    def submit(self, request: Request, sink: EventSink) -> None: ...

    def submit(self, request: Request, sink: EventSink | None = None) -> TokenStream | None:
        """Prepare a request and queue it; its events come through the stream, or go to `sink`.

        Raises: UsageError, TemplateError, ContextOverflow (refused, nothing queued); QueueFull;
        Unavailable (closed, or the engine's thread died); what the gate of the hooks raises.
        """
        self._check_alive()
        stream = TokenStream(request.request_id, self.cancel) if sink is None else None
        into = sink if stream is None else stream
        assert into is not None
        self._join_queue(into)
        try:
            run = prepare(request, self._facts, self._spec, into, self._tiers, self._answers)
            self._gate(run)
        except BaseException:
            self._leave_queue(into)
            self._check_alive()  # a model closed meanwhile is the reason, whatever it broke
            raise
        self._loop.inbox.put(Submit(run))
        with self._admission:
            was_cancelled = self._preparing.pop(into)
        if was_cancelled:  # what was sent before the request came too early
            self._loop.inbox.put(Cancel(into))
        self._check_alive()
        return stream

    def cancel(self, sink: EventSink) -> None:
        """End the request of a sink within one step, or as soon as it is prepared; from any thread, at any time."""
        with self._admission:
            if sink in self._preparing:
                self._preparing[sink] = True
        self._loop.inbox.put(Cancel(sink))

    def ping(self, callback: Callable[[], None]) -> None:
        """Have the engine's thread call back between two steps; never, where it hangs or dies.

        Raises: Unavailable, or the error that the thread died of.
        """
        self._check_alive()
        self._loop.inbox.put(Ping(callback))

    def stream(self, prompt: str | Sequence[Message], **settings: Any) -> TokenStream:
        """Submit one prompt (text, or chat messages) with settings such as max_tokens, temperature, seed."""
        return self.submit(self.request(prompt, **settings))

    def request(self, prompt: str | Sequence[Message], **settings: Any) -> GenerationRequest:
        """Return the request for a prompt: text becomes one user message, or is continued as it is
        where the model has no chat template."""
        options = options_from(settings)
        if not isinstance(prompt, str):
            return ChatRequest(tuple(prompt), options)
        if self._facts.template is None:
            return CompletionRequest(prompt, options)
        return ChatRequest(({"role": "user", "content": prompt},), options)

    def generate(self, prompts: Sequence[str | Sequence[Message] | GenerationRequest], **settings: Any) -> list[Answer]:
        """Answer all prompts, batched together, in their order.

        Waits while the queue is full of its own. Raises: what `submit` raises, or the error of the
        first prompt that failed.
        """
        requests = [self.request(p, **settings) if isinstance(p, (str, Sequence)) else p for p in prompts]
        answers, waiting = list[Answer](), list[TokenStream]()
        try:
            for request in requests:
                while (stream := self._submit_beside(request, waiting)) is None:
                    answers.append(collect(waiting.pop(0)))
                waiting.append(stream)
            while waiting:
                answers.append(collect(waiting.pop(0)))
        finally:
            for stream in waiting:
                stream.cancel()
        return answers

    def prompt_tokens(self, request: Request) -> list[int]:
        """Return the ids that a request's prompt becomes."""
        return list(encode_prompt(request, self._facts, recollection=recollection_of(request, self._answers)).tokens)

    def render_prompt(self, request: ChatRequest) -> tuple[str, list[int]]:
        """Return a conversation's prompt as the template writes it, and the ids that it becomes."""
        return render_prompt(request, self._facts).plain, self.prompt_tokens(request)

    def explain(self, request: Request) -> Explanation:
        """Return what the caches know of a request's prompt, and why not more. Nothing is computed.

        Raises: what refuses the request; Unavailable.
        """
        self._check_alive()
        return self._caches.explain(request)

    def warm(self, request: GenerationRequest, on_event: Callable[[Event], None] = lambda event: None) -> Warmed:
        """Compute a document, or a conversation's beginning, as far as whatever goes on after it begins, and pin it.

        `on_event` gets what happens meanwhile. Raises: what refuses the request or fails it.
        """
        return warm(self, request, on_event)

    def document(self, request: Request) -> list[int]:
        """Return the ids with which every prompt begins that goes on after this one. Raises: what refuses it."""
        return document_tokens(request, self.prompt_tokens)

    def kept(self, request: GenerationRequest, wait_s: float = _KEEPING_S) -> Mapping[str, int]:
        """Return how many of a prompt's leading tokens each tier holds; waits for what is still to be kept."""
        self._check_alive()
        return self._caches.kept(request, wait_s)

    def cache_stats(self) -> CacheStats:
        """Return what the caches hold and what they have done."""
        return self._caches.stats()

    def clear_cache(self) -> Cleared:
        """Forget all that is kept of requests that have ended: on the device, in RAM, and this model's on disk."""
        self._check_alive()
        return self._caches.clear()

    def limit_ram(self, limit_bytes: int) -> None:
        """Keep KV in at most so much RAM from now on."""
        self._tiers.limit_ram(limit_bytes)

    def stats(self) -> RuntimeStats:
        """Return a copy of the runtime's counters."""
        return replace(self._scheduler.stats)

    def wait_ended(self) -> None:
        """Wait until the engine's thread has ended, by `close` or by dying."""
        self._loop.wait_ended()

    def close(self) -> None:
        """End what is at work with an error and free the model. Idempotent."""
        self._loop.close()

    def _on_engine(self, question: Callable[[], T]) -> T:
        """Return what the engine's thread answers between two steps. Raises: what it raised; Unavailable."""
        asked: Future[T] = Future()
        self.ping(lambda: _answer(asked, question))
        while True:
            try:
                return asked.result(timeout=_LOOK_S)
            except TimeoutError:
                if asked.done():
                    raise
                self._check_alive()

    def _submit_beside(self, request: Request, waiting: Sequence[TokenStream]) -> TokenStream | None:
        """Submit; None where the queue is full and one of those `waiting` will make room in it."""
        if len(waiting) > self._config.max_waiting // 2:  # the rest is for others
            return None
        try:
            return self.submit(request)
        except QueueFull:
            if not waiting:
                raise
            return None

    def _join_queue(self, sink: EventSink) -> None:
        """Count a request that will wait, also while it is prepared or on its way. Raises: QueueFull."""
        with self._admission:
            n_on_their_way = self._n_submitted - self._scheduler.n_received
            if n_on_their_way + self._scheduler.n_waiting >= self._config.max_waiting:
                raise QueueFull(f"The queue is full ({self._config.max_waiting} waiting).", "try again in a moment")
            self._n_submitted += 1
            self._preparing[sink] = False

    def _leave_queue(self, sink: EventSink) -> None:
        with self._admission:
            self._n_submitted -= 1
            del self._preparing[sink]

    def _check_alive(self) -> None:
        if not self._loop.is_alive:
            death = self._loop.death
            raise (rebuild(told(death)) if death else Unavailable("The model is closed.", "open it again"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
