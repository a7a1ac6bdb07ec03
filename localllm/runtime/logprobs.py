"""Log-probabilities under the raw logits: before bias, penalties, truncation and temperature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.models.tokenizer import Tokenizer
from localllm.runtime.events import TokenLogprob
from localllm.runtime.truncation import best_positions

FLOOR = -9999.0
_ROUNDING = 1e-12  # taken off, so that rounding never lifts the sum of probabilities over 1


def logprobs(logits: NDArray[np.floating[Any]], token: int, n_top: int, tokenizer: Tokenizer) -> TokenLogprob:
    """Return the log-probability of `token` and the `n_top` most probable tokens, best first.

    Shapes: logits [n_vocab], raw. Every value is finite, <= 0 and >= -9999; the probabilities of
    distinct tokens add up to at most 1. `raw` are a token's exact bytes.
    """
    best = float(logits.max())
    wide = logits.astype(np.float64)
    log_sum = math.inf
    if math.isfinite(best):
        wide -= best
        log_sum = math.log(np.exp(wide).sum()) + _ROUNDING

    def entry(index: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        value = float(wide[index]) - log_sum
        return TokenLogprob(index, tokenizer.piece(index), value if value > FLOOR else FLOOR, top)

    places = best_positions(logits, n_top) if n_top else np.empty(0, dtype=np.intp)
    ordered = places[np.argsort(-logits[places], kind="stable")]
    return entry(token, tuple(entry(index) for index in ordered.tolist()))
