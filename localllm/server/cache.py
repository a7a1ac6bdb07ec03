"""`POST /v1/cache/explain`: what the caches know of a prompt, and why not more. It generates nothing.

It takes the body of a chat or of a completion as it would be sent, and tells nothing but the caller's own words.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import UsageError
from localllm.runtime.kv.explain import Explanation, Reason
from localllm.runtime.types import ChatRequest, GenerationRequest
from localllm.server import openai_chat, openai_completions, options
from localllm.server.body import Body, decode, read
from localllm.server.replies import reply
from localllm.server.state import ServerState, record_of
from localllm.server.wire import ChatBody, CompletionBody

EXPLAIN_PATH: Final = "/v1/cache/explain"

Tier = Literal["device", "ram", "disk"]


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
    tier: Tier | None
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
        first = await read(request.scope, request.receive, self._state, _Either)
        kind: type[ChatBody | CompletionBody] = ChatBody if "messages" in first.names else CompletionBody
        body: Body[Any] = await asyncio.to_thread(decode, first.data, kind)
        headers = options.check_fields(body, self._state.settings.strict)
        wanted, left_out = self._request(body.value, request)
        worker = await self._state.supervisor.worker(body.value.model, self._state.settings.limits.load_wait_s)
        record_of(request.scope).model = worker.name
        argument = {
            "kind": "chat" if isinstance(wanted, ChatRequest) else "completion",
            "request": msgspec.to_builtins(wanted),
        }
        told = msgspec.convert(await worker.call("explain", argument), Explanation)
        return reply(_answer(worker.name, told), headers=headers | left_out)

    def _request(self, asked: ChatBody | CompletionBody, request: Request) -> tuple[GenerationRequest, dict[str, str]]:
        if isinstance(asked, ChatBody):
            return openai_chat.request_of(asked, request.scope, self._state.settings)
        wanted, *others = openai_completions.requests_of(asked, request.scope, self._state.settings)
        if others:
            raise UsageError("One prompt is explained at a time.", "send one prompt", field="prompt")
        return wanted, {}


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
