"""A short proof of what a workload asked: equal digests, equal requests."""

from __future__ import annotations

import hashlib
from itertools import islice

import msgspec

from localllm.bench.workloads.ask import Ask, Workload
from localllm.bench.workloads.schema import answer_schema


def digest(workload: Workload, seed: int, *, n_sessions: int = 4) -> str:
    """Return the SHA-256 (hex) over every field of all requests of the first sessions."""
    found = hashlib.sha256()
    for session in islice(workload.sessions(seed), n_sessions):
        found.update(msgspec.json.encode([_fields(ask) for ask in session], order="sorted") + b"\n")
    return found.hexdigest()


def _fields(ask: Ask) -> dict[str, object]:
    return {
        "kind": ask.kind,
        "max_tokens": ask.max_tokens,
        "messages": ask.messages,
        "prompt": ask.prompt,
        "suffix": ask.suffix,
        "tools": ask.tools,
        "tool_choice": ask.tool_choice,
        "schema": None if ask.answer_type is None else answer_schema(ask.answer_type),
        "is_free": ask.is_free,
        "at_s": ask.at_s,
        "extra": ask.extra,
    }
