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
    "evicted",
    "adapter",
    "other_settings",
    "template_date",
    "never_seen",
]
"""Why no more of a prompt is known. Where several hold, the first of this list is told."""

MESSAGES: Mapping[Reason, str] = {
    "complete": "All is known but the last token, which is always computed.",
    "off": "This request asks for no cache, so all of it is computed.",
    "in_progress": "Another request is computing more of it right now; this one would wait for it.",
    "window": "More of it is held, but of the sliding window before that point the model has kept too little.",
    "checkpoint": "More of it is held, but the state of this model can only be taken up where it was kept.",
    "block_end": "More of it is held, in a block that is only used as a whole.",
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
    last of them lie, "" = none are known; `age_s`: since that was last used, None where that is not known.
    `diverges_at` None = all is known but the last token.
    """

    n_prompt_tokens: int
    reason: Reason
    message: str
    known_tokens: Mapping[str, int] = field(default_factory=dict)
    n_held_tokens: int = 0
    tier: str = ""
    age_s: float | None = None
    diverges_at: Divergence | None = None

    @property
    def n_known_tokens(self) -> int:
        """Leading tokens that would not be computed."""
        return sum(self.known_tokens.values())


@dataclass(frozen=True, slots=True)
class Known:
    """What is found of one sequence of tokens under one root.

    `by_tier`: usable tokens; `n_held`: common ones, usable or not; `n_coming`: those that a running
    request will soon have computed.
    """

    by_tier: Mapping[str, int]
    n_held: int
    n_coming: int = 0
    age_s: float | None = None

    @property
    def n_usable(self) -> int:
        """Leading tokens that would not be computed."""
        return sum(self.by_tier.values())

    @property
    def tier(self) -> str:
        """Where the last usable token lies."""
        return next((tier for tier in ("disk", "ram", "device") if self.by_tier.get(tier)), "")


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
