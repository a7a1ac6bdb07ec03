"""What the caches know of a prompt, and why not more: the words in which that is told.

Only the caller's own words are ever told, never what another request left in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localllm.models.tokenizer import Tokenizer
from localllm.runtime.types import Tokens

Reason: TypeAlias = Literal[
    "complete",
    "off",
    "in_progress",
    "window",
    "checkpoint",
    "block_end",
    "too_little",
    "evicted",
    "adapter",
    "other_settings",
    "template_date",
    "never_seen",
]
"""Why no more of a prompt is known. Where several hold, the first of this list is told."""

AnyTier: TypeAlias = Literal["device", "ram", "disk"]
"""Where KV may lie: on the device, or in a tier below it (`matching.Tier`)."""

MESSAGES: Mapping[Reason, str] = {
    "complete": "All is known that can be: the rest, at least the last token, is always computed.",
    "off": "This request asks for no cache, so all of it is computed.",
    "in_progress": "Another request is computing more of it right now; this one would wait for it.",
    "window": "More of it is held, but of the sliding window before that point the model has kept too little.",
    "checkpoint": "More of it is held, but the state of this model can only be taken up where it was kept.",
    "block_end": "More of it is held, in a block that is only used as a whole.",
    "too_little": "More of it is held, but so little that computing it is quicker than putting it back.",
    "evicted": "What follows was held and had to make room.",
    "adapter": "What follows is held for another adapter only.",
    "other_settings": "What follows is held on disk for other load settings (context type, threads, version) only.",
    "template_date": "The chat template writes the date, and what follows is held as of another day.",
    "never_seen": "What follows was not computed before, as far as is remembered.",
}

_TOKENS_AROUND = 16
_CHARS_AROUND = 80


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the known part of a prompt ends, in the caller's own words.

    `token` is the prompt's at `position`, `text` its text; `before` and `after` are at most 80 characters.
    """

    position: int
    token: int
    text: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the caches know of a prompt, and why not more.

    `known_tokens`: what would be taken from each tier ("device", "ram", "disk") if the request came now;
    `n_held_tokens`: leading tokens of it that are held, also those that cannot be used. `tier`: where the
    last of the known ones lie, "" = none are known; `age_s`: since that was last used, None where that is not known.
    `diverges_at` None = all is known but the last token.
    """

    n_prompt_tokens: int
    reason: Reason
    message: str
    known_tokens: Mapping[str, int] = field(default_factory=dict)
    n_held_tokens: int = 0
    tier: AnyTier | Literal[""] = ""
    age_s: float | None = None
    diverges_at: Divergence | None = None

    @property
    def n_known_tokens(self) -> int:
        """Leading tokens that would not be computed."""
        return sum(self.known_tokens.values())


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prompt's beginning that was computed to be kept. In tokens, by tier.

    `found_tokens`: what was known of it before; `kept_tokens`: how much of it each tier holds now, on disk
    only what has been written; `is_pinned`: it stays in those tiers until they are cleared.
    """

    n_tokens: int
    n_computed_tokens: int
    found_tokens: Mapping[str, int]
    kept_tokens: Mapping[str, int]
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the caches of one loaded model hold and have done.

    `pool_tokens` and the cells are the device's; `retained_cells` are held for their prefix alone.
    `prompt_tokens`: by where their KV came from. `disk`: of the folder of all models (its fields are those
    of `DiskStats`), None without one.
    """

    pool_tokens: int
    used_cells: int
    retained_cells: int
    n_retained_slots: int
    n_device_evictions: int
    ram_limit_bytes: int
    ram_bytes: int
    n_ram_blocks: int
    n_ram_evictions: int
    prompt_tokens: Mapping[str, int]
    n_exported_blocks: int
    export_s: float
    n_restored_blocks: int
    restore_s: float
    n_refused_blocks: int
    disk: Mapping[str, int | str] | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """What clearing the caches of one model freed."""

    n_device_cells: int = 0
    n_ram_blocks: int = 0
    ram_bytes: int = 0
    n_disk_blocks: int = 0
    disk_bytes: int = 0


def divergence(tokenizer: Tokenizer, tokens: Tokens, position: int) -> Divergence:
    """Return the caller's words around a position of its prompt."""
    before = tokenizer.decode(tokens[max(0, position - _TOKENS_AROUND) : position])
    after = tokenizer.decode(tokens[position + 1 : position + 1 + _TOKENS_AROUND])
    return Divergence(
        position=position,
        token=tokens[position],
        text=tokenizer.decode(tokens[position : position + 1])[:_CHARS_AROUND],
        before=before.lstrip("\ufffd")[-_CHARS_AROUND:],
        after=after.rstrip("\ufffd")[:_CHARS_AROUND],
    )
