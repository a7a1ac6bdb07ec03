"""`POST /v1/cache/explain`: what the caches know of a prompt, and why not more. It generates nothing.

It takes the body of a chat or of a completion as it would be sent, and tells nothing but the caller's own words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import UsageError
from localllm.runtime.kv.explain import AnyTier, Explanation, Reason
from localllm.runtime.types import ChatRequest, GenerationRequest
from localllm.server import openai_chat, openai_completions, options
from localllm.server.body import Body, decode, read
from localllm.server.isolation import Sender, sender_of
from localllm.server.replies import reply
from localllm.server.state import ServerState, record_of
from localllm.server.wire import ChatBody, CompletionBody

EXPLAIN_PATH: Final = "/v1/cache/explain"


class TierTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that would be taken from each tier if the request came now."""

    device: int = 0
    ram: int = 0
    disk: int = 0


class CacheDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token that is not held: its position, its id and text, and at most 80 characters before and after.

    All of it is the caller's own prompt.
    """

    position: int
    token: int
    text: str
    before: str
    after: str


class CacheExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the caches know of a prompt.

    `n_known_tokens` of it would not be computed; `n_held_tokens` are held, usable or not. `tier`: where the
    last of the known ones lie; `age_s`: seconds since that was last used. `reason`: why no more is known.
    """

    object: Literal["cache.explanation"] = "cache.explanation"
    model: str
    n_prompt_tokens: int
    n_known_tokens: int
    n_held_tokens: int
    known_tokens: TierTokens
    tier: AnyTier | None
    age_s: float | None
    reason: Reason
    message: str
    diverges_at: CacheDivergence | None


class _Either(msgspec.Struct, frozen=True):
    """A body of which only the names at its top are looked at."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the route."""
    return [Route(EXPLAIN_PATH, Explains(state).explain, methods=["POST"])]


class Explains:
    """Asks the worker's thread for its caches. Raises what refuses the body."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def explain(self, request: Request) -> Response:
        """Answer with what is known of a prompt."""
        strict, sender = self._state.settings.strict, sender_of(request.scope, self._state.settings)
        first = await read(request.scope, request.receive, self._state, _Either)
        body = await asyncio.to_thread(decoded, first.data, first.names)
        wanted, headers = request_of(body, sender, strict=strict)
        worker = await self._state.supervisor.worker(body.value.model, self._state.settings.limits.load_wait_s)
        record_of(request.scope).model = worker.name
        argument = {
            "kind": "chat" if isinstance(wanted, ChatRequest) else "completion",
            "request": msgspec.to_builtins(wanted),
        }
        told = msgspec.convert(await worker.call("explain", argument), Explanation)
        return reply(_answer(worker.name, told), headers=headers)


def decoded(data: bytes, names: Collection[str]) -> Body[Any]:
    """Return a body with these names as that of a chat where it has messages, else of a completion.

    Raises: UsageError for what is neither.
    """
    if "messages" not in names and "prompt" not in names:
        raise UsageError("There are neither messages nor a prompt.", "send messages, or prompt")
    kind: type[ChatBody | CompletionBody] = ChatBody if "messages" in names else CompletionBody
    return decode(data, kind)


def request_of(body: Body[Any], sender: Sender, *, strict: bool) -> tuple[GenerationRequest, dict[str, str]]:
    """Return the one request of a chat's or a completion's body, and the headers that tell what of it has no effect.

    Raises: UsageError for what could not be answered, and for several prompts.
    """
    ignored = options.check_fields(body, strict)
    if isinstance(body.value, ChatBody):
        request, left_out = openai_chat.request_of(body.value, sender)
        return request, ignored | left_out
    wanted, *others = openai_completions.requests_of(body.value, sender)
    if others:
        raise UsageError("Only one prompt at a time is looked at.", "send one prompt", field="prompt")
    return wanted, ignored


def _answer(model: str, told: Explanation) -> CacheExplanation:
    at = told.diverges_at
    return CacheExplanation(
        model=model,
        n_prompt_tokens=told.n_prompt_tokens,
        n_known_tokens=told.n_known_tokens,
        n_held_tokens=told.n_held_tokens,
        known_tokens=TierTokens(**told.known_tokens),
        tier=told.tier or None,
        age_s=told.age_s,
        reason=told.reason,
        message=told.message,
        diverges_at=None if at is None else msgspec.convert(at, CacheDivergence, from_attributes=True),
    )
