"""Writes an ask as the request that an OpenAI endpoint takes, and judges an answer against its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from localllm.bench.client.calls import Call
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.spec import Api
from localllm.bench.workloads.ask import Ask
from localllm.bench.workloads.schema import answer_schema

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SEED = 1
"""Of every request: at temperature 0 it decides nothing, but a server that draws anyway draws the same."""


def cannot_send(ask: Ask, api: Api) -> str:
    """Say why an API has no way to ask this; "" where it has."""
    if api == "openai-completions" and ask.prompt is None:
        if ask.tools:
            return "tools can only be offered by --api openai-chat"
        if ask.answer_type is not None:
            return "a schema can only be asked for by --api openai-chat"
    return ""


def call_of(ask: Ask, endpoint: Endpoint, *, fills_length: bool, label: str = "", keep_text: bool = False) -> Call:
    """Return the request of an ask: streamed, greedy, with usage; `fills_length` where its answer is free text.

    A text completion goes to /v1/completions whatever the endpoint's API, a chat is written out as plain text for
    it. The text of the answer is kept where it is to be judged, and where `keep_text` says so.
    """
    fields: dict[str, Any] = {
        **ask.extra,
        "model": endpoint.model,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if fills_length and ask.is_free:
        fields["ignore_eos"] = True
    path = CHAT
    if ask.prompt is not None or endpoint.api == "openai-completions":
        path = COMPLETIONS
        fields["prompt"] = _plain(ask) if ask.prompt is None else ask.prompt
        if ask.suffix is not None:
            fields["suffix"] = ask.suffix
    else:
        fields["messages"] = list(ask.messages)
        fields |= _tools(ask)
        if ask.answer_type is not None:
            fields["response_format"] = _response_format(ask.answer_type)
    return Call.of(path, fields, label=label, keep_text=keep_text or ask.answer_type is not None)


def is_valid(ask: Ask, text: str) -> bool | None:
    """Say whether an answer's text is what its schema allows; None for an ask without one."""
    if ask.answer_type is None:
        return None
    try:
        msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=ask.answer_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _tools(ask: Ask) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if ask.tools:
        found["tools"] = list(ask.tools)
    if ask.tool_choice in (None, "auto", "none", "required"):
        return found if ask.tool_choice is None else {**found, "tool_choice": ask.tool_choice}
    return {**found, "tool_choice": {"type": "function", "function": {"name": ask.tool_choice}}}


def _response_format(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    schema = answer_schema(kind)
    return {"type": "json_schema", "json_schema": {"name": kind.__name__, "schema": schema, "strict": True}}


def _plain(ask: Ask) -> str:
    """Return a chat as the text that a completion goes on from."""
    lines = [f"{str(message['role']).capitalize()}: {message.get('content') or ''}" for message in ask.messages]
    return "\n\n".join([*lines, "Assistant:"])
