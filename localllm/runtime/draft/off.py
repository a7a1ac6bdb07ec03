"""No drafts: the drafter of an engine that cannot roll back, and of a request that wants none."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.runtime.draft.base import Draft, Drafted
from localllm.runtime.types import Tokens


class Off:
    """A `Drafter` that proposes nothing."""

    def propose(self, sequences: Sequence[Drafted], budget: int) -> list[Draft]:
        """Return an empty draft for each sequence."""
        return [Draft()] * len(sequences)

    def accepted(self, sequence: Drafted, tokens: Tokens) -> None:
        """Learn nothing."""

    def forget(self, sequence: Drafted) -> None:
        """Keep nothing, so forget nothing."""
