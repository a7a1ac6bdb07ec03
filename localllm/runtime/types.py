"""What a caller asks: frozen requests, the same for the CLI, the library and HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Tokens: TypeAlias = Sequence[int]
"""Token ids of one sequence, in order: shape [n_tokens]."""

Message: TypeAlias = Mapping[str, Any]
"""One chat turn in OpenAI's shape: role, content (str, None or parts), tool_calls, tool_call_id, ..."""

CacheUse: TypeAlias = Literal["on", "off", "pin"]

MAX_SEED = 2**64 - 1
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 2**31


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to answer, whatever the prompt is.

    `sampling` holds only what the caller set, keyed by the field names of `sampling_params.Sampling`;
    the rest comes from the model's defaults. `max_tokens` None = what is left of the context.
    `logprobs` None = none, k = the chosen token's and the k best alternatives' at each position.
    `reuse_prefix` False = the prompt is computed, whatever is held of it. `cache`: "off" = nothing that is
    held is used, and nothing is kept; "pin" = what is computed is kept until the caches are cleared.
    `is_private`: nothing of the request is written to disk. `salt`: requests of different salts share no KV.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    reuse_prefix: bool = True
    cache: CacheUse = "on"
    is_private: bool = False
    salt: str = ""
    priority: int = 0
    client: str = ""


def new_request_id() -> str:
    """Return a fresh opaque id: 24 hexadecimal digits."""
    return os.urandom(12).hex()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation for the model's chat template.

    `template_kwargs` reach the template as globals (`enable_thinking`, ...).
    """

    messages: tuple[Message, ...]
    options: GenerationOptions = GenerationOptions()
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = field(default_factory=new_request_id)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Text that is already rendered (special spellings are parsed), or token ids as they are.

    With a `suffix`, the answer is what stands between prompt and suffix (models with
    fill-in-the-middle tokens only); then both are plain text, in which no specials are parsed.
    """

    prompt: str | tuple[int, ...]
    options: GenerationOptions = GenerationOptions()
    suffix: str | None = None
    request_id: str = field(default_factory=new_request_id)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts (no specials are parsed), or token ids, to embed; of the options only client and priority count."""

    inputs: tuple[str | tuple[int, ...], ...]
    options: GenerationOptions = GenerationOptions()
    request_id: str = field(default_factory=new_request_id)


GenerationRequest: TypeAlias = ChatRequest | CompletionRequest
Request: TypeAlias = GenerationRequest | EmbeddingRequest
