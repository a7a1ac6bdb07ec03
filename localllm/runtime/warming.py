"""Computes a document or a system prompt ahead of the requests that will begin with it, and has it kept.

Works through whatever can submit a request, so that a model in another process is warmed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from localllm.errors import UsageError
from localllm.runtime.events import Event
from localllm.runtime.kv.explain import Warmed
from localllm.runtime.stream import TokenStream, collect
from localllm.runtime.types import (
    CompletionRequest,
    EmbeddingRequest,
    GenerationOptions,
    GenerationRequest,
    Message,
    Request,
    Tokens,
)

_CONTINUATIONS = (" A", "\n\nB", "1")
"""What may follow a document: only tokens that do not depend on it are the document's own."""


class Warmable(Protocol):
    """What warming needs of a model."""

    def submit(self, request: Request) -> TokenStream:
        """Queue a request."""
        ...

    def document(self, request: GenerationRequest) -> list[int]:
        """Return the ids with which every prompt begins that goes on after this one."""
        ...

    def kept(self, request: GenerationRequest) -> Mapping[str, int]:
        """Return how many of a prompt's leading tokens each tier holds, once what is to be kept is kept."""
        ...


def warm(model: Warmable, request: GenerationRequest, on_event: Callable[[Event], None] = lambda event: None) -> Warmed:
    """Compute a prompt up to where any continuation begins, and pin it in the tiers.

    `on_event` gets what happens meanwhile (`Admitted`, `Progress`, ...). Raises: what refuses the request
    or fails it; UsageError where continuations have no beginning in common, and where no cache is wanted.
    """
    if request.options.cache == "off":
        raise UsageError("A request that wants no cache cannot be warmed.", "leave cache out", field="cache")
    ids = model.document(request)
    options = GenerationOptions(
        max_tokens=1,
        cache="pin",
        reuse_prefix=request.options.reuse_prefix,
        sampling={"temperature": 0.0},
        salt=request.options.salt,
        is_private=request.options.is_private,
        client=request.options.client,
        priority=request.options.priority,
    )
    wanted = CompletionRequest(tuple(ids), options)
    usage = collect(_told(model.submit(wanted), on_event)).usage
    kept = model.kept(wanted)
    return Warmed(
        n_tokens=len(ids),
        n_computed_tokens=usage.prompt_tokens - sum(usage.cached_tokens.values()),
        found_tokens=usage.cached_tokens,
        kept_tokens=kept,
        is_pinned=any(n for tier, n in kept.items() if tier != "device"),
    )


def document_tokens(request: Request, tokens_of: Callable[[Request], Tokens]) -> list[int]:
    """Return the ids with which every prompt begins that goes on after `request`; `tokens_of` encodes one.

    A conversation that ends with a user's message goes on in it, any other with a message of the user.
    Raises: UsageError for what is no prompt, or has no ids of its own.
    """
    from localllm.runtime.slots import common_prefix  # it brings numpy, which a server's client does without

    if isinstance(request, EmbeddingRequest):
        raise UsageError("Texts to embed are never cached.", "give one prompt", field="prompt")
    if isinstance(request, CompletionRequest) and request.suffix is not None:
        raise UsageError("What stands between two texts cannot be warmed.", "leave suffix out", field="suffix")
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        return list(tokens_of(request))
    first, *others = [list(tokens_of(continued(request, text))) for text in _CONTINUATIONS]
    n_common = min(common_prefix(first, other) for other in others)
    if n_common == 0:
        raise UsageError("Prompts that go on after this one have no beginning in common.", "give a longer text")
    return first[:n_common]


def continued(request: GenerationRequest, text: str = _CONTINUATIONS[0]) -> GenerationRequest:
    """Return a request that begins with another one and goes on with `text`, or with nothing after ids."""
    if isinstance(request, CompletionRequest):
        return replace(request, prompt=request.prompt + text) if isinstance(request.prompt, str) else request
    *before, last = request.messages or ({},)
    if last.get("role") != "user":
        return replace(request, messages=(*request.messages, {"role": "user", "content": text.strip()}))
    return replace(request, messages=(*before, _longer(last, text)))


def _longer(message: Message, text: str) -> Message:
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + text}
    *before, part = content
    longer = {**part, "text": part.get("text", "") + text} if isinstance(part, dict) else f"{part}{text}"
    return {**message, "content": [*before, longer]}


def _told(stream: TokenStream, on_event: Callable[[Event], None]) -> Iterator[Event]:
    """Yield the stream's events, each told before it is handed on."""
    for event in stream:
        on_event(event)
        yield event
