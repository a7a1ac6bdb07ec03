"""The sampler: one row of logits to one token, and drafts to their accepted run.

The chain and its order stand in `Sampling`. Truncation works on few survivors: filter first,
sort what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import EngineError, UsageError
from localllm.models.tokenizer import Vocabulary
from localllm.runtime.draft.base import Draft
from localllm.runtime.draws import Draws, Purpose
from localllm.runtime.penalties import Dry, last, penalise_repeats
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.truncation import Candidates, pick, truncate
from localllm.runtime.types import Tokens


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
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.intp)
        self._bias = np.array([addend for _, addend in sampling.logit_bias], dtype=np.float32)
        self._ends = np.array(sorted(vocabulary.eog_ids), dtype=np.intp)
        self._min_tokens = min_tokens
        self._ignore_eos = ignore_eos
        self._penalises = (
            sampling.repeat_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        ) and sampling.repeat_last_n != 0
        is_dry = sampling.dry_multiplier > 0 and sampling.dry_penalty_last_n != 0
        self._dry = Dry(sampling, piece) if is_dry else None
        reach = [sampling.repeat_last_n] * self._penalises + [sampling.dry_penalty_last_n] * is_dry
        self._n_recent = -1 if -1 in reach else max(reach, default=0)

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
        Mutates: `constraint`, which moves past the token.
        Raises: EngineError if the logits hold no finite maximum (NaN, or all -inf).
        """
        token = self._choose(logits, position, last(context, self._n_recent), constraint)
        if constraint is not None:
            constraint.advance(token)
        return token

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
        A certain draft is compared with what `sample` gives, so it never changes the answer; one
        with `q` is accepted with min(1, p/q), else the residual is sampled, so it never changes
        the answer's distribution.
        Mutates: `constraint`, which moves past the tokens returned.
        Raises: EngineError as `sample` does.
        Source: Leviathan et al., speculative decoding, arXiv:2211.17192.
        """
        recent = list(last(context, self._n_recent))
        accepted: list[int] = []
        for i, proposed in enumerate((*draft.tokens, None)):
            if proposed is None or draft.q is None or self._sampling.greedy:
                token = self._choose(logits[i], position + i, recent, constraint)
            else:
                token = self._verify(logits[i], proposed, draft.q[i], position + i, recent, constraint)
            accepted.append(token)
            if constraint is not None:
                constraint.advance(token)
            if token != proposed:
                break
            if self._n_recent:
                recent.append(token)
        return accepted

    def _choose(self, row: NDArray[np.float32], position: int, recent: Tokens, constraint: Constraint | None) -> int:
        """Sample from the truncated set; only a token that is not allowed costs a mask and a second draw."""
        adjusted = self._adjusted(row, position, recent)
        first, xtc_draw, again, _ = self._draws.uniform(position, Purpose.SAMPLE)
        left = truncate(adjusted, self._sampling, xtc_draw)
        token = left.draw(first, self._sampling.temperature)
        if constraint is None or constraint.allows(token):
            return token
        left = self._allowed(left, adjusted, row, xtc_draw, constraint.mask())
        return left.draw(again, self._sampling.temperature)

    def _verify(
        self,
        row: NDArray[np.float32],
        proposed: int,
        q: NDArray[np.floating[Any]],
        position: int,
        recent: Tokens,
        constraint: Constraint | None,
    ) -> int:
        """Keep the proposed token with min(1, p/q), else sample max(p - q, 0)."""
        adjusted = self._adjusted(row, position, recent)
        draw, xtc_draw, _, _ = self._draws.uniform(position, Purpose.SAMPLE)
        left = truncate(adjusted, self._sampling, xtc_draw)
        if constraint is not None:
            left = self._allowed(left, adjusted, row, xtc_draw, constraint.mask())
        p = left.weights(self._sampling.temperature).astype(np.float64)
        p /= p.sum()
        place = proposed if left.ids is None else int(np.searchsorted(left.ids, proposed))
        p_proposed = p[place] if place < len(left) and left.token(place) == proposed else 0.0
        if self._draws.uniform(position, Purpose.ACCEPT)[0] * float(q[proposed]) < p_proposed:
            return proposed
        residual = np.maximum(p - (q if left.ids is None else q[left.ids]), 0.0)
        return left.token(pick(residual if residual.any() else p, draw))

    def _adjusted(self, row: NDArray[np.float32], position: int, recent: Tokens) -> NDArray[np.float32]:
        """Return the row with bias, penalties and bans; the row itself where there are none."""
        bans = len(self._ends) > 0 and (self._ignore_eos or position < self._min_tokens)
        if not math.isfinite(row.max()):
            raise EngineError("the model gave logits that are not numbers", "localllm doctor")
        if not (bans or self._penalises or self._dry or len(self._bias)):
            return row
        adjusted = row.copy()
        adjusted[self._bias_ids] += self._bias
        if self._penalises:
            penalise_repeats(adjusted, last(recent, self._sampling.repeat_last_n), self._sampling)
        if self._dry:
            self._dry.penalise(adjusted, last(recent, self._sampling.dry_penalty_last_n))
        if bans:
            adjusted[self._ends] = -np.inf
            if not math.isfinite(adjusted.max()):
                raise EngineError("the model offers nothing but the end of the answer", "leave out ignore_eos")
        return adjusted

    def _allowed(
        self,
        left: Candidates,
        adjusted: NDArray[np.float32],
        row: NDArray[np.float32],
        xtc_draw: float,
        mask: NDArray[np.bool_],
    ) -> Candidates:
        """Restrict the truncated set; if nothing is left of it, mask first and truncate after.

        Where only banned tokens are allowed, the constraint wins: what is complete may end.
        """
        kept = left.within(mask)
        if len(kept) and math.isfinite(kept.logits.max()):
            return kept
        for logits in (adjusted, row):
            masked = np.where(mask, logits, np.float32(-np.inf))
            if math.isfinite(masked.max()):
                return truncate(masked, self._sampling, xtc_draw)
        raise EngineError("the constraint allows no token here", "give a schema or grammar that can end")
