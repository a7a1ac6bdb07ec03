"""`/tokenize`, `/detokenize` and `/apply-template`: what a text becomes before the model sees it.

They take llama.cpp's names (`content`) and vLLM's (`prompt`), and answer in both.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import UsageError
from localllm.server.body import Body, read
from localllm.server.fields import NOTHING_REFUSED, Neutral, ignored_fields
from localllm.server.isolation import sender_of
from localllm.server.openai_chat import conversation_of
from localllm.server.replies import reply
from localllm.server.state import ServerState, record_of

if TYPE_CHECKING:
    from localllm.worker.supervisor import Worker

MAX_CHARS: Final = 2_000_000
MAX_CHARS_IN_PIECES: Final = 200_000
MAX_TOKENS: Final = 1_000_000

TEMPLATE_REFUSED: Final[Neutral] = {
    "add_generation_prompt": ((True,), "leave it out"),
    "continue_final_message": ((False,), "leave it out"),
    "chat_template": ((), "the server's user gives a template: localllm serve --template FILE"),
}


Text = Annotated[str, Meta(max_length=MAX_CHARS)]


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text, as `content` or as `prompt`. With pieces it may have at most 200 000 characters.

    `add_special` (also `add_special_tokens`): begin with the model's first token, as with `prompt` by
    default. `parse_special`: spellings of special tokens become those tokens. `with_pieces`: tokens
    come with their texts, or bytes where these are no whole characters; `return_token_strs`: beside them.
    """

    content: Text | None = None
    prompt: Text | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False


class Piece(msgspec.Struct, frozen=True):
    """A token and its text; its bytes where they are no whole characters."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens, their number, and the longest sequence in tokens that the model takes."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Their text, under both names."""

    content: str
    prompt: str


class TemplateBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, as in a chat request."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TemplateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt that the model would see, and its tokens' number."""

    prompt: str
    n_tokens: int


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the three routes."""
    tokens = Tokens(state)
    return [
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/apply-template", tokens.apply_template, methods=["POST"]),
    ]


class Tokens:
    """Asks the worker's threads, never the engine's. Each raises what refuses it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> Response:
        """Answer with the tokens of a text."""
        body = await read(request.scope, request.receive, self._state, TokenizeBody)
        asked, headers = body.value, self._ignored(body, NOTHING_REFUSED)
        text, add_bos = _text_of(asked)
        has_pieces = asked.with_pieces or asked.return_token_strs
        if has_pieces and len(text) > MAX_CHARS_IN_PIECES:
            raise UsageError(
                f"A text of {len(text)} characters is too long to be told in pieces.",
                "send less, or leave with_pieces and return_token_strs out",
                field="content" if asked.content is not None else "prompt",
                limit=MAX_CHARS_IN_PIECES,
            )
        worker = await self._worker(request, asked.model)
        told = await worker.call(
            "tokenize",
            {"text": text, "parse_special": asked.parse_special, "add_bos": add_bos, "with_pieces": has_pieces},
        )
        answer = _answer(told["tokens"], worker)
        if has_pieces:
            answer |= await asyncio.to_thread(_with_pieces, told["tokens"], told["pieces"], asked)
        return reply(answer, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        """Answer with the text of tokens."""
        body = await read(request.scope, request.receive, self._state, DetokenizeBody)
        headers = self._ignored(body, NOTHING_REFUSED)
        worker = await self._worker(request, body.value.model)
        told = await worker.call("detokenize", {"tokens": body.value.tokens})
        return reply({"content": told["text"], "prompt": told["text"]}, headers=headers)

    async def apply_template(self, request: Request) -> Response:
        """Answer with the prompt that a conversation becomes."""
        body = await read(request.scope, request.receive, self._state, TemplateBody)
        asked, headers = body.value, self._ignored(body, TEMPLATE_REFUSED)
        conversation, left_out = conversation_of(asked, sender_of(request.scope, self._state.settings))
        worker = await self._worker(request, asked.model)
        told = await worker.call("template", {"kind": "chat", "request": msgspec.to_builtins(conversation)})
        return reply({"prompt": told["prompt"], "n_tokens": told["n_tokens"]}, headers=headers | left_out)

    def _ignored(self, body: Body[Any], refused: Neutral) -> dict[str, str]:
        return ignored_fields(body, refused, self._state.settings.strict)

    async def _worker(self, request: Request, model: str | None) -> Worker:
        worker = await self._state.supervisor.worker(model, self._state.settings.limits.load_wait_s)
        record_of(request.scope).model = worker.name
        return worker


def _answer(ids: list[int], worker: Worker) -> dict[str, Any]:
    n_longest = worker.model["max_sequence_tokens"]
    return {"tokens": ids, "count": len(ids), "max_model_len": n_longest, "token_strs": None}


def _with_pieces(ids: list[int], pieces: list[list[int]], asked: TokenizeBody) -> dict[str, Any]:
    """Return the parts of the answer that hold the tokens' texts."""
    told: dict[str, Any] = {}
    if asked.with_pieces:
        told["tokens"] = [Piece(i, _piece(bytes(piece))) for i, piece in zip(ids, pieces, strict=True)]
    if asked.return_token_strs:
        told["token_strs"] = [bytes(piece).decode("utf-8", "replace") for piece in pieces]
    return told


def _text_of(asked: TokenizeBody) -> tuple[str, bool]:
    """Return the text, and whether it begins a sequence. Raises: UsageError unless one text was given."""
    if (asked.content is None) == (asked.prompt is None):
        raise UsageError("Give either content or prompt.", 'send {"content": "..."}', field="content")
    wishes = {wish for wish in (asked.add_special, asked.add_special_tokens) if wish is not None}
    if len(wishes) > 1:
        raise UsageError("add_special and add_special_tokens disagree.", "send one of them", field="add_special")
    if asked.content is not None:
        return asked.content, True in wishes
    return asked.prompt or "", False not in wishes


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
