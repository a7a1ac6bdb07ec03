"""Finds out what answers at an address: whether it is an OpenAI endpoint, its models, what it tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from localllm.bench.client.calls import Target
from localllm.bench.serving.address import without_choice
from localllm.bench.serving.asking import Reply, ask
from localllm.bench.serving.failures import KEY_REFUSED, key_refused
from localllm.bench.serving.spec import Api
from localllm.errors import LocalLLMError, ServerUnreachable, UsageError

FACT_TIMEOUT_S = 5.0
LIST_TIMEOUT_S = 60.0
"""For a server's list of models, which computes nothing: one that hangs is not waited for as for an answer."""
MAX_FACT_BYTES = 64 << 10
MAX_NAME_CHARS = 1000
UNNAMED = "default"
"""What the model of a server is called that lists none, where `?model=NAME` does not say."""
_NO_LIST = (404, 405, 501)
_FACTS = ("/version", "/props", "/api/version")
_PROPS = ("build_info", "model_path", "total_slots", "default_generation_settings", "chat_template_caps")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model of a server. `facts`: what the server tells of itself, as it tells it.

    Keys of `facts`: "server" (its header), "models" (listed names), "model" (its entry of /v1/models), "version",
    "props", "api_version"; what a server has no route for is left out. `counts`: counts the tokens of a text by the
    model's own file, where that is on this machine.
    """

    target: Target
    model: str
    api: Api
    facts: Mapping[str, Any] = field(default_factory=dict)
    counts: Callable[[str], int | None] = lambda text: None


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens a text is, and who says so."""

    n_tokens: int
    source: Literal["server tokenizer", "local tokenizer"]


def discover(
    url: str, *, api: Api, model: str | None = None, key: str | None = None, timeout_s: float = 600.0
) -> Endpoint:
    """Return the endpoint at `url`, which may choose one of its models by `?model=NAME`.

    Raises: UsageError for a model that is not there, ServerUnreachable with a sentence for everything else that
    keeps it from being measured.
    """
    address, named = without_choice(url)
    model = model or named
    target = _target(address, key, timeout_s)
    reply = _listed(address, target, has_key=key is not None)
    if reply.status in _NO_LIST and _answers(target, api, model or UNNAMED):
        return Endpoint(target, model or UNNAMED, api, {"url": address, "models": [], "model": {}} | _told(target))
    entries = _entries(address, reply)
    names = [str(entry["id"]) for entry in entries]
    if model is not None and model not in names:
        raise UsageError(
            f"{address} has no model {model!r}: it lists {', '.join(names[:8])}.", f"{address}?model={names[0]}"
        )
    chosen = model or names[0]
    entry = entries[names.index(chosen)]
    facts: dict[str, Any] = {"url": address, "models": names, "model": entry if _is_brief(entry) else {"id": chosen}}
    if "server" in reply.headers:
        facts["server"] = reply.headers["server"]
    facts |= _told(target)
    return Endpoint(target, chosen, api, facts)


async def count_tokens(endpoint: Endpoint, text: str) -> TokenCount | None:
    """Return how many tokens `text` is, as the server's /tokenize counts, else the model's file; None without either.

    No special token is added. Source: llama.cpp's server ({"content"}) and vLLM ({"model", "prompt"}).
    """
    n_tokens = await _count_there(endpoint, text)
    if n_tokens is not None:
        return TokenCount(n_tokens, "server tokenizer")
    n_tokens = await asyncio.to_thread(endpoint.counts, text)
    return None if n_tokens is None else TokenCount(n_tokens, "local tokenizer")


async def _count_there(endpoint: Endpoint, text: str) -> int | None:
    target = replace(endpoint.target, timeout_s=min(endpoint.target.timeout_s, 60.0))
    for fields in (
        {"content": text, "add_special": False},
        {"model": endpoint.model, "prompt": text, "add_special_tokens": False},
    ):
        try:
            reply = await asyncio.to_thread(ask, target, "/tokenize", fields)
        except LocalLLMError:
            return None
        if reply.status == 404:
            return None
        body = reply.json
        if reply.status == 200 and isinstance(body, dict):
            return _count(body)
    return None


def _target(address: str, key: str | None, timeout_s: float) -> Target:
    try:
        return Target.of_url(address, key=key, timeout_s=timeout_s)
    except UsageError as error:
        raise ServerUnreachable(error.message, error.hint) from None


def _count(body: Mapping[str, Any]) -> int | None:
    n_tokens, tokens = body.get("count"), body.get("tokens")
    if isinstance(n_tokens, int) and not isinstance(n_tokens, bool):
        return n_tokens
    return len(tokens) if isinstance(tokens, list) else None


def _listed(address: str, target: Target, *, has_key: bool) -> Reply:
    """Return the list of models, or say in which way there is none."""
    reply = ask(replace(target, timeout_s=min(target.timeout_s, LIST_TIMEOUT_S)), "/v1/models")
    if reply.status in KEY_REFUSED:
        raise key_refused(address, has_key=has_key, status=reply.status)
    if reply.status >= 500:
        raise ServerUnreachable(
            f"{address} is not ready: HTTP {reply.status} for /v1/models.",
            "wait for its model to load, and look at its log",
        )
    return reply


def _answers(target: Target, api: Api, model: str) -> bool:
    """Say whether a server that lists no models answers the API's questions all the same."""
    asked: dict[str, Any] = {"model": model, "max_tokens": 1, "stream": True}
    if api == "openai-chat":
        reply = ask(target, "/v1/chat/completions", asked | {"messages": [{"role": "user", "content": "Hi."}]})
    else:
        reply = ask(target, "/v1/completions", asked | {"prompt": "Hi."})
    is_stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    return reply.status == 200 and (is_stream or (isinstance(reply.json, dict) and "choices" in reply.json))


def _entries(address: str, reply: Reply) -> list[Mapping[str, Any]]:
    if reply.status != 200:
        raise ServerUnreachable(
            f"{address} is no OpenAI endpoint: HTTP {reply.status} for /v1/models.",
            "give the address that /v1 follows, as http://127.0.0.1:8080",
        )
    body = reply.json
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        what = "a web page" if "html" in reply.headers.get("content-type", "") else "something else"
        raise ServerUnreachable(
            f"{address} is no OpenAI endpoint: it answers /v1/models with {what}.",
            "give the address that /v1 follows, as http://127.0.0.1:8080",
        )
    entries: list[Mapping[str, Any]] = [
        entry
        for entry in data
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and len(entry["id"]) <= MAX_NAME_CHARS
    ]
    if not entries:
        raise ServerUnreachable(f"{address} serves no model.", "load one there, and ask again")
    return entries


def _told(target: Target) -> dict[str, Any]:
    """Return what its further routes tell; a server that has none of them is no worse for it."""
    found: dict[str, Any] = {}
    quick = replace(target, timeout_s=FACT_TIMEOUT_S)
    for path in _FACTS:
        try:
            reply = ask(quick, path)
        except ServerUnreachable:
            continue
        body = reply.json
        if reply.status != 200 or not isinstance(body, dict) or "error" in body:
            continue
        name = path.removeprefix("/").replace("/", "_")
        told = {key: body[key] for key in _PROPS if key in body} if path == "/props" else body
        if _is_brief(told):
            found[name] = told
    return found


def _is_brief(fact: Mapping[str, Any]) -> bool:
    """Say whether a fact may stand in every run's document."""
    return len(msgspec.json.encode(fact)) <= MAX_FACT_BYTES
