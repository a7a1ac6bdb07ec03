"""One fixed question to a server, and how its answer came."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.cli.http_client import HttpClient
from localllm.errors import ServerUnreachable


class Failed(Exception):
    """A step that did what it should, with a result that it should not have; `facts` tell which."""

    def __init__(self, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


@dataclass(frozen=True, slots=True)
class Told:
    """How an answer came. Times in seconds from the request on."""

    text: str
    finish_reason: str | None
    first_token_s: float
    total_s: float
    usage: Mapping[str, Any]

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were not computed."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def ask(client: HttpClient, path: str, body: Mapping[str, Any]) -> Told:
    """Return a streamed answer. Raises: ServerUnreachable, Failed for an error or a stream that breaks off."""
    started_s = time.monotonic()
    first_s: float | None = None
    text, finish_reason, is_done = "", None, False
    usage: Mapping[str, Any] = {}
    with client.stream(path, body) as response:
        if response.status != 200:
            raise Failed(f"HTTP {response.status}: {response.read(2000).decode('utf-8', 'replace')}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                is_done = True
                break
            event = json.loads(line[6:])
            if event.get("error"):
                raise Failed(f"an error after the stream began: {event['error'].get('message')}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if piece and first_s is None:
                    first_s = time.monotonic() - started_s
                text += piece
                finish_reason = choice.get("finish_reason") or finish_reason
    if not is_done or finish_reason is None:
        raise Failed("the stream broke off")
    total_s = time.monotonic() - started_s
    return Told(text, finish_reason, total_s if first_s is None else first_s, total_s, usage)


def tell(answer: Told) -> tuple[str, dict[str, Any]]:
    n_tokens = int(answer.usage.get("completion_tokens") or 0)
    if not answer.text or not n_tokens:
        raise Failed("the answer is empty")
    facts = {
        "first_token_s": answer.first_token_s,
        "total_s": answer.total_s,
        "finish_reason": answer.finish_reason,
        "cached_tokens": answer.n_cached,
        "prompt_tokens": answer.usage.get("prompt_tokens"),
        "completion_tokens": n_tokens,
        "text": answer.text,
    }
    end = f"ended by {answer.finish_reason} after {answer.total_s:.2f} s"
    return f"first token after {answer.first_token_s:.2f} s, {n_tokens} tokens, {end}", facts


def first_model(client: HttpClient) -> str:
    reply = client.ask("GET", "/v1/models")
    try:
        return str(reply.json["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise ServerUnreachable(f"The server lists no model: {reply.problem}", "localllm serve") from None
