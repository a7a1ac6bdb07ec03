"""Requests with a unique string in one place each: every field, header and path a user's text can stand in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Raw:
    """One request as it is sent. `body` None = a GET."""

    path: str
    body: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)

    def bytes(self, host: str) -> bytes:
        """Return what goes over the wire; the server is asked to close after it."""
        headers = {"Host": host, "Connection": "close"}
        if self.body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(self.body))}
        lines = [f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (headers | dict(self.headers)).items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (self.body or b"")


def _user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, **more}


def _plain(**more: Any) -> dict[str, Any]:
    return _user("hello", **more)


def _tool(name: str, text: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _called(canary: str) -> list[dict[str, Any]]:
    call = {"id": canary, "type": "function", "function": {"name": canary, "arguments": json.dumps({"a": canary})}}
    return [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": canary, "content": canary},
    ]


def chat_bodies(c: str) -> dict[str, dict[str, Any]]:
    """Return chat bodies by what holds the canary `c`; some are answered, some are refused."""
    schema = {"type": "json_schema", "json_schema": {"name": c, "schema": {"title": c, "enum": [c]}}}
    return {
        "user message": _user(c),
        "user message, streamed": _user(c, stream=True),
        "message of parts": _user([{"type": "text", "text": c}]),
        "system message": {"messages": [{"role": "system", "content": c}, {"role": "user", "content": "x"}]} | _n(),
        "assistant message": {"messages": [*_user("x")["messages"], {"role": "assistant", "content": c}]} | _n(),
        "name of a speaker": {"messages": [{"role": "user", "content": "x", "name": c}]} | _n(),
        "role": {"messages": [{"role": c, "content": "x"}]} | _n(),
        "image part": _user([{"type": "image_url", "image_url": {"url": f"data:{c}"}}]),
        "kind of a part": _user([{"type": c, c: c}]),
        "tool": _plain(tools=[_tool(c, c, {c: {"type": "string", "enum": [c]}})]),
        "tool choice": _plain(tools=[_tool("f", "x", {})], tool_choice={"type": "function", "function": {"name": c}}),
        "tool call and its result": {"messages": _called(c)} | _n(),
        "stop": _plain(stop=[c]),
        "stop of a wrong type": _plain(stop=[{c: 1}]),
        "user": _plain(user=c),
        "metadata": _plain(metadata={c: c}, store=True),
        "model": _plain(model=c),
        "model as a path": _plain(model=f"../{c}/x.gguf"),
        "response_format": _plain(response_format=schema),
        "grammar": _plain(grammar=f'root ::= "{c}"'),
        "key of logit_bias": _plain(logit_bias={c: 1}),
        "value of logit_bias": _plain(logit_bias={"5": c}),
        "unknown field": _plain(**{c: c}),
        "temperature as text": _plain(temperature=c),
        "max_tokens as text": _plain(max_tokens=c),
        "stream_options": _plain(stream=True, stream_options={c: True}),
        "reasoning_effort": _plain(reasoning_effort=c),
        "too long": _user(f"{c} " * 20_000),
        "n of a wrong type": _plain(n=[c]),
        "seed of a wrong type": _plain(seed=c),
        "logprobs of a wrong type": _plain(logprobs=c, top_logprobs=c),
        "chat_template_kwargs": _plain(chat_template_kwargs={c: c}),
    }


def _n() -> dict[str, Any]:
    return {"max_tokens": 3}


def other_bodies(c: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return bodies for the other endpoints, each with its path."""
    return {
        "prompt": (COMPLETIONS, {"prompt": c, "max_tokens": 3}),
        "prompt, streamed": (COMPLETIONS, {"prompt": [c], "max_tokens": 3, "stream": True}),
        "prompt with logprobs": (COMPLETIONS, {"prompt": c, "max_tokens": 2, "logprobs": 2, "echo": True}),
        "prompt of a wrong type": (COMPLETIONS, {"prompt": {c: c}}),
        "suffix": (COMPLETIONS, {"prompt": "a", "suffix": c, "max_tokens": 3}),
        "embedding input": (EMBEDDINGS, {"input": c}),
        "embedding inputs": (EMBEDDINGS, {"input": ["x", c]}),
        "embedding encoding": (EMBEDDINGS, {"input": "x", "encoding_format": c}),
        "embedding of a wrong type": (EMBEDDINGS, {"input": [{c: c}]}),
        "tokenize": ("/tokenize", {"content": c}),
        "detokenize of a wrong type": ("/detokenize", {"tokens": [c]}),
        "apply-template": ("/apply-template", {"messages": [{"role": "user", "content": c}]}),
        "model to load": ("/v1/models/load", {"model": c}),
        "model to unload": ("/v1/models/unload", {"model": c}),
    }


def raw_bodies(c: str) -> dict[str, bytes]:
    """Return bodies that are no JSON, or no JSON that is taken."""
    good = json.dumps(_user(c)).encode()
    return {
        "JSON that breaks off": good[:-3],
        "text instead of JSON": c.encode(),
        "JSON with a comment": good + f" // {c}".encode(),
        "JSON that is not UTF-8": good[:-1] + b', "x": "\xff' + c.encode() + b'"}',
        "JSON with a byte order mark": b"\xef\xbb\xbf" + good,
        "duplicate key": good[:-1] + f', "{c}": 1, "{c}": 2}}'.encode(),
        "number out of range": good[:-1] + f', "{c}": 1e999}}'.encode(),
        "deep nesting": f'{{"{c}": '.encode() + b"[" * 300 + b"]" * 300 + b"}",
        "lone surrogate": good[:-1] + f', "user": "{c}\\ud800"}}'.encode(),
        "list instead of an object": json.dumps([c]).encode(),
        "empty": b"",
    }


def odd_requests(c: str) -> dict[str, Raw]:
    """Return requests whose path or headers hold the canary."""
    body = json.dumps(_plain()).encode()
    return {
        "path": Raw(f"/v1/{c}", body),
        "path of a model": Raw(f"/v1/models/{c}", None),
        "query": Raw(f"{CHAT}?{c}={c}", body),
        "query of a page": Raw(f"/metrics?x={c}", None),
        "x-request-id": Raw(CHAT, body, {"x-request-id": f"{c}!"}),
        "authorization": Raw(CHAT, body, {"Authorization": f"Bearer {c}"}),
        "api-key": Raw(CHAT, body, {"api-key": c, "x-api-key": c}),
        "user-agent": Raw(CHAT, body, {"User-Agent": c, "Referer": f"http://localhost/{c}", "Cookie": f"a={c}"}),
        "host": Raw(CHAT, body, {"Host": f"{c}.test"}),
        "origin": Raw(CHAT, body, {"Origin": f"http://{c}.test"}),
        "content-type": Raw(CHAT, body, {"Content-Type": f"text/{c}"}),
        "content-encoding": Raw(CHAT, body, {"Content-Encoding": c}),
        "name of a header": Raw(CHAT, body, {f"x-{c}": c, "x-stainless-lang": c}),
        "long header": Raw(CHAT, body, {"x-long": c * 8000}),
        "bad header": Raw(CHAT, body, {f"x {c}": "\x01"}),
    }


def requests(c: str) -> dict[str, Raw]:
    """Return every kind of request, by what holds the canary `c`."""
    found = {f"chat: {name}": Raw(CHAT, json.dumps(body).encode()) for name, body in chat_bodies(c).items()}
    for name, (path, fields) in other_bodies(c).items():
        found[name] = Raw(path, json.dumps(fields).encode())
    for name, body in raw_bodies(c).items():
        found[f"body: {name}"] = Raw(CHAT, body)
    found |= {f"head: {name}": raw for name, raw in odd_requests(c).items()}
    return found
