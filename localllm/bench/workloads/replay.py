"""The workload `replay:FILE`: the requests of a recording, at their times or one after another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import msgspec

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.trace import Recorded, Trace, read_trace
from localllm.errors import UsageError

KIND: Final = "replay"
# What decides the answer's form goes along; sampling, lengths and streaming are the benchmark's own.
_EXTRA: Final = ("response_format", "json_schema", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
_FORMED: Final = ("response_format", "json_schema")


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded trace as a workload; each of its requests is a session of its own."""

    spec: str
    facts: Mapping[str, Any]
    asks: tuple[Ask, ...]
    is_trace: bool = True

    def sessions(self, seed: int) -> Iterator[Session]:
        """Yield the requests in the order in which they were sent, once; the seed changes nothing."""
        for ask in self.asks:
            yield (ask,)


def replay(path: Path) -> Replay:
    """Return the workload of a recording. Raises UsageError: no trace, or nothing in it to send again."""
    trace = read_trace(path)
    sent = [(recorded, ask) for recorded in trace.requests if (ask := _ask(recorded)) is not None]
    if not sent:
        raise UsageError(f"{path} has no request that was answered.", "localllm bench record URL -o FILE")
    began_s = sent[0][0].at_s
    asks = tuple(replace(ask, at_s=recorded.at_s - began_s) for recorded, ask in sent)
    return Replay(f"replay:{trace.sha256[:12]}", _facts(trace, [one for one, _ in sent], asks), asks)


def _ask(recorded: Recorded) -> Ask | None:
    """Return a request to send again; None for one that failed, or that no text or conversation makes up."""
    was_answered = recorded.ended in ("answer", "cancelled") and recorded.status == 200
    n_tokens = recorded.completion_tokens or recorded.n_pieces
    if not was_answered or n_tokens < 1:
        return None
    body = recorded.body
    extra = {name: body[name] for name in _EXTRA if body.get(name) is not None}
    is_free = not any(name in extra for name in _FORMED)
    if recorded.path.endswith("/chat/completions"):
        return _chat_ask(body, n_tokens, extra, is_free)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        return None
    suffix = body.get("suffix")
    return Ask(
        KIND,
        n_tokens,
        prompt=prompt,
        suffix=suffix if isinstance(suffix, str) else None,
        is_free=is_free,
        extra=extra,
    )


def _chat_ask(body: Mapping[str, Any], n_tokens: int, extra: dict[str, Any], is_free: bool) -> Ask | None:
    messages, tools, choice = body.get("messages"), body.get("tools"), body.get("tool_choice")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    if isinstance(choice, dict):
        extra["tool_choice"] = choice
    tools = tools if isinstance(tools, list) else []
    if not all(map(_is_tool, tools)):
        return None
    return Ask(
        KIND,
        n_tokens,
        messages=tuple(map(_message, messages)),
        tools=tuple(tools),
        tool_choice=choice if isinstance(choice, str) else None,
        is_free=is_free and (not tools or choice == "none"),
        extra=extra,
    )


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is one text, as the benchmark's own are."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(text for text in texts if isinstance(text, str))
    return {"role": "user", **message, "content": content}


def _facts(trace: Trace, sent: Sequence[Recorded], asks: Sequence[Ask]) -> Mapping[str, Any]:
    """Return what is in it, in numbers."""
    lengths = [_n_characters(ask) for ask in asks]
    prompts = [one.prompt_tokens for one in sent if one.prompt_tokens is not None]
    return {
        "texts": trace.header.texts,
        "began_at": trace.header.began_at,
        "n_requests": len(asks),
        "n_left_out": len(trace.requests) - len(asks),
        "n_cancelled": sum(one.ended == "cancelled" for one in sent),
        "is_cut": trace.is_cut,
        "duration_s": round(asks[-1].at_s or 0.0, 3),
        "prompt_characters": _spread(lengths),
        "recorded_prompt_tokens": _spread(prompts),
        "answer_tokens": _spread([ask.max_tokens for ask in asks]),
        "shared_prefix_share": round(_shared_share(asks), 4),
    }


def _spread(numbers: Sequence[int]) -> Mapping[str, float] | None:
    if not numbers:
        return None
    return {"min": min(numbers), "median": statistics.median(numbers), "max": max(numbers), "sum": sum(numbers)}


def _texts(ask: Ask) -> list[str]:
    """Return what an ask says, a text for each step of its prefix."""
    if ask.prompt is not None:
        return [*ask.prompt.splitlines(keepends=True), ask.suffix or ""]
    head = [msgspec.json.encode(ask.tools).decode()] if ask.tools else []
    return [*head, *(msgspec.json.encode(message).decode() for message in ask.messages)]


def _n_characters(ask: Ask) -> int:
    return sum(map(len, _texts(ask)))


def _shared_share(asks: Sequence[Ask]) -> float:
    """Return which share of all prompts' characters begins an earlier prompt in the same way."""
    seen: set[tuple[int, str]] = set()
    shared = total = 0
    for ask in asks:
        steps, key = [], 0
        for text in _texts(ask):
            steps.append((key, text))
            key = hash((key, text))
        shared += sum(len(text) for _, text in takewhile(seen.__contains__, steps))
        total += sum(len(text) for _, text in steps)
        seen.update(steps)
    return shared / total if total else 0.0
