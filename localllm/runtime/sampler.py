"""The sampler: one row of logits to one token, and drafts to their accepted run.

The chain and its order stand in `Sampling`. Truncation works on few survivors: filter first,
sort what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError
from localllm.models.tokenizer import Vocabulary
from localllm.runtime.draft.base import Draft
from localllm.runtime.draws import Draws
from localllm.runtime.sampling_params import Sampling, model_defaults, resolve
from localllm.runtime.types import Tokens

__all__ = ["Constraint", "Sampler", "Sampling", "model_defaults", "resolve"]


class Constraint(Protocol):
    """What an answer must obey, at the place it has reached."""

    def allows(self, token: int) -> bool:
        """Say whether `token` may come next; cheap."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, bool [n_vocab]; dear, so asked only when needed."""
        ...

    def advance(self, token: int) -> None:
        """Move on by an allowed token."""
        ...


class Sampler:
    """Chooses the tokens of one choice of one request. Not shared between threads.

    End-of-generation tokens are banned at answer positions before `min_tokens`, and everywhere
    with `ignore_eos`. `piece` gives a token's bytes (`Tokenizer.piece`; DRY's breakers are text).
    A draw depends on (seed, choice, position) only: not on batching, preemption, or drafts made
    with certainty.

    Raises: UsageError for a logit bias on an id outside the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        choice: int = 0,
        vocabulary: Vocabulary,
        piece: Callable[[int], bytes],
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        for token, _ in sampling.logit_bias:
            if token >= vocabulary.n_vocab:
                raise UsageError(
                    f"logit_bias names token {token}, the vocabulary ends at {vocabulary.n_vocab - 1}",
                    "localllm tokens MODEL TEXT shows the ids of a text",
                    field="logit_bias",
                )
        self._sampling = sampling
        self._draws = Draws(seed, choice)

    def sample(
        self,
        logits: NDArray[np.float32],
        *,
        position: int,
        context: Tokens,
        constraint: Constraint | None = None,
    ) -> int:
        """Choose the token at answer position `position` (0 = the first of the answer).

        Shapes: logits float32 [n_vocab], not changed; `context` = prompt and answer before it.
        Raises: EngineError if the logits hold no finite maximum (NaN, or all -inf).
        """
        return int(np.argmax(logits))

    def accept(
        self,
        logits: NDArray[np.float32],
        draft: Draft,
        *,
        position: int,
        context: Tokens,
        constraint: Constraint | None = None,
    ) -> list[int]:
        """Verify a draft: return its accepted run and the one token sampled after, 1..k+1 tokens.

        Shapes: logits float32 [k+1, n_vocab], row i follows `context` and the first i draft tokens.
        """
        accepted: list[int] = []
        for i, proposed in enumerate((*draft.tokens, None)):
            token = self.sample(logits[i], position=position + i, context=[*context, *accepted], constraint=constraint)
            accepted.append(token)
            if token != proposed:
                break
        return accepted
