"""What makes a token less likely because of what was written before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.runtime.sampling_params import Sampling

_MAX_DRY_TOKENS = 128  # a longer repetition weighs no more: by then the token is out
_MAX_DRY_PENALTY = 1e6


def last(tokens: Sequence[int], n: int) -> Sequence[int]:
    """Return the last `n` tokens, all for -1."""
    return tokens if n < 0 else tokens[max(0, len(tokens) - n) :]


def penalise_repeats(logits: NDArray[np.float32], recent: Sequence[int], sampling: Sampling) -> None:
    """Lower the logits of the `recent` tokens, in place.

    Repeat divides a positive logit and multiplies a negative one, once however often the token
    occurred; presence is taken off once, frequency once an occurrence.
    Source: Keskar et al., CTRL, arXiv:1909.05858; OpenAI API reference.
    """
    if not len(recent):
        return
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    values = logits[ids]
    if sampling.repeat_penalty != 1:
        values = np.where(values > 0, values / sampling.repeat_penalty, values * sampling.repeat_penalty)
    logits[ids] = values - (sampling.presence_penalty + counts * sampling.frequency_penalty)


class Dry:
    """The DRY penalty: against going on with a passage that was written before.

    If the text's last L tokens occurred earlier, L >= `dry_allowed_length`, the token that followed
    them there loses multiplier * base ** (L - allowed length), for the longest such L (128 tokens
    beyond the allowed length at most). A repetition does not reach across a token that completes a
    sequence breaker, and a token that holds a breaker is never penalised.
    Source: p-e-w, "DRY", text-generation-webui #5677.
    """

    def __init__(self, sampling: Sampling, piece: Callable[[int], bytes]) -> None:
        self._sampling = sampling
        self._piece = piece
        self._breakers = tuple(text.encode("utf-8", "replace") for text in sampling.dry_sequence_breakers)

    def penalise(self, logits: NDArray[np.float32], recent: Sequence[int]) -> None:
        """Lower, in place, the logits of the tokens that would go on with a repetition in `recent`."""
        allowed = self._sampling.dry_allowed_length
        for token, n_repeated in self._repetitions(np.asarray(recent, dtype=np.int64)).items():
            if n_repeated >= allowed and not any(text in self._piece(token) for text in self._breakers):
                penalty = self._sampling.dry_multiplier * self._sampling.dry_base ** (n_repeated - allowed)
                logits[token] -= min(penalty, _MAX_DRY_PENALTY)

    def _repetitions(self, recent: NDArray[np.int64]) -> dict[int, int]:
        """Return, by token, the longest end of `recent` that it followed before, in tokens."""
        n = len(recent)
        ends = np.flatnonzero(recent[:-1] == recent[-1]) if n else np.empty(0, dtype=np.intp)
        lengths = np.zeros(len(ends), dtype=np.int64)
        alive, depth = np.arange(len(ends)), 0
        while len(alive) and depth < self._sampling.dry_allowed_length + _MAX_DRY_TOKENS:
            if self._breaks(recent, n - 1 - depth):
                break
            at = ends[alive] - depth
            alive = alive[(at >= 0) & (recent[at] == recent[n - 1 - depth])]
            depth += 1
            lengths[alive] = depth
        longest: dict[int, int] = {}
        for token, length in zip(recent[ends + 1].tolist(), lengths.tolist(), strict=True):
            longest[token] = max(length, longest.get(token, 0))
        return longest

    def _breaks(self, recent: NDArray[Any], index: int) -> bool:
        """Say whether the token at `index` completes a breaker."""
        text = self._piece(int(recent[index]))
        if any(breaker in text for breaker in self._breakers):
            return True
        n_before = max((len(breaker) for breaker in self._breakers), default=1) - 1
        before = b""
        while len(before) < n_before and index > 0:
            index -= 1
            before = self._piece(int(recent[index])) + before
        return any(
            breaker in before[len(before) - n + 1 :] + text for breaker in self._breakers if (n := len(breaker)) > 1
        )
