"""The drafting seam: what a drafter proposes, and what it hears back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from localllm.runtime.types import Tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow what a sequence has; verified by `Sampler.accept`.

    `q` None: proposed with certainty (forced, n-gram). Else float [n_tokens, n_vocab], row i the
    distribution that token i was drawn from (it sums to 1, and gives that token more than 0); the
    draws are independent of those of the sampler (`Purpose.DRAFT`).
    """

    tokens: tuple[int, ...] = ()
    q: NDArray[np.floating] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, n_tokens: int) -> Draft:
        """Return the first `n_tokens` of this draft."""
        if n_tokens >= len(self.tokens):
            return self
        return Draft(self.tokens[:n_tokens], None if self.q is None else self.q[:n_tokens])


class Drafted(Protocol):
    """What a drafter may read of a sequence; the object itself is its identity."""

    @property
    def tokens(self) -> Tokens:
        """Prompt and answer so far."""
        ...


class Drafter(Protocol):
    """Proposes the tokens that come next. Called by the engine's thread only.

    A failure is the drafter's own: it is switched off with a warning, the requests go on.
    """

    def propose(self, sequences: Sequence[Drafted], budget: int) -> list[Draft]:
        """Return one draft a sequence (an empty one = none), `budget` tokens in all at most."""
        ...

    def accepted(self, sequence: Drafted, tokens: Tokens) -> None:
        """Take note that `tokens` were added to `sequence` (its draft's accepted run and one more)."""
        ...

    def forget(self, sequence: Drafted) -> None:
        """Drop all that is kept for `sequence`; idempotent."""
        ...
