"""A vocabulary of single letters and a constraint that counts what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.models.tokenizer import Vocabulary
from localllm.runtime.sampler import Sampler
from localllm.runtime.sampling_params import Sampling, resolve


class Letters:
    """Token i is the byte 65 + i; token 0 ends the answer."""

    def __init__(self, n_vocab: int) -> None:
        self.vocabulary = Vocabulary(n_vocab, None, 0, frozenset({0}), False, ())

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False) -> list[int]:
        return [byte - 65 for byte in text.encode()]

    def piece(self, token: int) -> bytes:
        return bytes([65 + token % 60])

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.piece, tokens)).decode()


class OneOf:
    """Allows, at each place of the answer, the tokens of one set (the last set from there on)."""

    def __init__(self, n_vocab: int, *sets: set[int]) -> None:
        self._n_vocab = n_vocab
        self._sets = sets
        self.passed: list[int] = []
        self.n_masks = 0

    @property
    def _now(self) -> set[int]:
        return self._sets[min(len(self.passed), len(self._sets) - 1)]

    def allows(self, token: int) -> bool:
        return token in self._now

    def mask(self) -> NDArray[np.bool_]:
        self.n_masks += 1
        mask = np.zeros(self._n_vocab, dtype=np.bool_)
        mask[list(self._now)] = True
        return mask

    def advance(self, token: int) -> None:
        assert self.allows(token)
        self.passed.append(token)


def sampler(n_vocab: int, *, seed: int = 1, choice: int = 0, min_tokens: int = 0, **wishes: Any) -> Sampler:
    """Return a sampler over `Letters(n_vocab)`; `ignore_eos` may stand among the wishes."""
    letters = Letters(n_vocab)
    ignore_eos = wishes.pop("ignore_eos", False)
    return Sampler(
        resolve(Sampling(), wishes),
        seed=seed,
        choice=choice,
        vocabulary=letters.vocabulary,
        piece=letters.piece,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
    )
