"""The bodies of generation requests as structs: what is decoded, and what /openapi.json tells.

Fields are null where a client leaves them out. Ranges are checked where the request is prepared.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

LogitBias: TypeAlias = dict[str, float] | list[tuple[int, float]]
"""Token id -> addend to its logit, or pairs of the two."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both generation routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache: Literal["on", "off"] | None = None
    cache_prompt: bool | None = None
    return_progress: bool | None = None
    timings: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    logit_bias: LogitBias | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
