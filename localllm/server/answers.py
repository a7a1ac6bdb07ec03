"""What is told beside an answer's text: usage, times, and the names that all its parts carry."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import localllm
from localllm.runtime.events import Usage

if TYPE_CHECKING:
    from localllm.worker.supervisor import Worker

TIERS: Final = ("device", "ram", "disk")
"""Where prompt tokens that were not computed can come from."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that are equal in every part of one answer."""

    id: str
    model: str
    fingerprint: str
    is_deterministic: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, answer_id: str, worker: Worker) -> Identity:
        """Return the identity of an answer by this worker's model."""
        model = worker.model
        told = fingerprint(model, localllm.__version__)
        return cls(answer_id, worker.name, told, bool(model.get("is_deterministic")))

    @property
    def own_fields(self) -> dict[str, Any]:
        """What no other server tells of its answers, as fields of each part."""
        return {"localllm": {"deterministic": True}} if self.is_deterministic else {}


@dataclass(frozen=True, slots=True)
class Costs:
    """What a request cost, as far as the wire tells it.

    `limit` is the tokens that each answer could have; `asked` what the client wanted. `ipc_ms` is time
    between the processes. `is_detailed`: every phase is told.
    """

    usage: Usage
    limit: int
    asked: int | None
    ipc_ms: float
    is_detailed: bool

    def usage_body(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens.values()),
                "cached_tokens_by_tier": {tier: usage.cached_tokens.get(tier, 0) for tier in TIERS},
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": usage.accepted_draft_tokens,
                "rejected_prediction_tokens": usage.rejected_draft_tokens,
            },
        }

    def timings_body(self) -> dict[str, Any]:
        """Return llama.cpp's `timings`, the time in the queue, and whether the answer's limit was lowered."""
        usage, times = self.usage, self.usage.timings_ms
        n_cached = sum(usage.cached_tokens.values())
        n_computed = usage.prompt_tokens - n_cached
        prompt_ms, predicted_ms = times.get("prefill", 0.0), times.get("decode", 0.0)
        told: dict[str, Any] = {
            "cache_n": n_cached,
            "prompt_n": n_computed,
            "prompt_ms": prompt_ms,
            "prompt_per_second": _rate(n_computed, prompt_ms),
            "predicted_n": usage.completion_tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_second": _rate(usage.completion_tokens, predicted_ms),
            "queue_ms": times.get("queue", 0.0),
        }
        if self.is_clipped:
            told |= {"max_tokens": self.limit, "max_tokens_asked": self.asked or 0}
        if self.is_detailed:
            told["timeline_ms"] = {**times, "ipc": round(self.ipc_ms, 3)}
        return told

    @property
    def is_clipped(self) -> bool:
        """Say whether fewer tokens were left than the client asked for."""
        return self.asked is not None and self.limit < self.asked


def whole_body(kind: str, identity: Identity, choices: list[dict[str, Any]], costs: Costs) -> dict[str, Any]:
    """Return the body of an answer that is not streamed. `kind`: its `object`."""
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created_s,
        "model": identity.model,
        "system_fingerprint": identity.fingerprint,
        **identity.own_fields,
        "choices": choices,
        "usage": costs.usage_body(),
        "timings": costs.timings_body(),
    }


def fingerprint(model: Mapping[str, Any], version: str) -> str:
    """Return the `system_fingerprint`: equal while file, settings and version are."""
    told = repr((version, model.get("sha256") or model.get("path"), sorted(model.get("settings", {}).items())))
    return "fp_" + hashlib.blake2b(told.encode(), digest_size=5).hexdigest()


def _rate(n_tokens: int, elapsed_ms: float) -> float:
    return round(n_tokens / elapsed_ms * 1000, 3) if elapsed_ms > 0 else 0.0
