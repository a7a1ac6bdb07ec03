"""The one stream of events that every encoder reads (CLI text, JSON, JSONL; later SSE).

Public and stable: `--jsonl` prints them as `encode` gives them. Exactly one of `Done` and
`Error` is last. A request with n choices has one stream; `choice` tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

VERSION = 1

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's natural log-probability under the raw logits, and the best alternatives.

    `raw` holds the token's exact bytes (a character may be cut between two tokens).
    """

    id: int
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """Accepted; `position` requests stand before it."""

    request_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """Work begins. `cached_tokens` by tier ("device", "ram", "disk").

    `seed` is the one used; `max_tokens` the limit of each answer, after clipping to the context.
    """

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill so far: `done_tokens` of `total_tokens` prompt tokens (cached ones count as done)."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """Text that became final for one choice, with the ids behind it.

    `text` may be empty while bytes of a character or a possible stop string are held back;
    joined texts are the answer. `logprobs` has one entry per id when asked for, else is empty.
    """

    choice: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice ended: "stop" (end token, or the stop string in `stop`), "length" or "cancelled"."""

    choice: int
    reason: FinishReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the request cost. Prompt tokens count once however many choices; times in ms by phase."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Mapping[str, int]
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embedding of input `index`: float32 [n_embd], little-endian, of length 1."""

    index: int
    vector: bytes


@dataclass(frozen=True, slots=True)
class Error:
    """The request failed; `index` is the choice (or input) at fault where one is.

    `details` are the numbers and the `field` behind it, as on the exception; never text of the request.
    """

    code: str
    message: str
    hint: str = ""
    index: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that did not fail."""


Event: TypeAlias = Queued | Admitted | Progress | Token | Embedded | Finished | Usage | Error | Done


def encode(event: Event) -> dict[str, Any]:
    """Return the public JSON form: `{"v": 1, "event": "token", ...}`; None, empty logprobs and details left out."""
    body = {name: value for name, value in _plain(event).items() if value is not None}
    for name in ("logprobs", "details"):
        if not body.get(name, True):
            del body[name]
    return {"v": VERSION, "event": type(event).__name__.lower(), **body}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, bytes) else value
