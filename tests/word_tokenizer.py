"""A tokenizer without a model that knows words, so that one text can be several rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.byte_tokenizer import ByteTokenizer


class WordTokenizer(ByteTokenizer):
    """Bytes and control spellings are tokens as in a `ByteTokenizer`; so are words, the longest first."""

    def __init__(
        self, specials: Sequence[str], words: Sequence[str], *, bos: str = "", eos: str = "", add_bos: bool = False
    ) -> None:
        super().__init__(specials, bos=bos, eos=eos, add_bos=add_bos)
        n_before = self.vocabulary.n_vocab
        self._words = {n_before + index: word.encode() for index, word in enumerate(words)}
        self.vocabulary = replace(self.vocabulary, n_vocab=n_before + len(words))

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, continues: bool = False) -> list[int]:
        """Return the tokens of a text."""
        ids = super().encode(text, parse_special=parse_special, add_bos=add_bos, continues=continues)
        longest_first = sorted(self._words.items(), key=lambda word: -len(word[1]))
        merged: list[int] = []
        while ids:
            found = next(((token, raw) for token, raw in longest_first if ids[: len(raw)] == list(raw)), None)
            merged.append(ids[0] if found is None else found[0])
            ids = ids[1 if found is None else len(found[1]) :]
        return merged

    def piece(self, token: int) -> bytes:
        """Return a token's bytes."""
        return self._words[token] if token in self._words else super().piece(token)

    def control(self, tokens: Sequence[int]) -> list[str]:
        """Return the spellings of the control tokens among `tokens`, in order."""
        return super().control([token for token in tokens if token not in self._words])

    def oddly(self, text: str) -> list[int]:
        """Return tokens of a text that are not those it becomes: its bytes."""
        ids = list(text.encode())
        assert ids != self.encode(text, parse_special=False)
        return ids

    def anyhow(self, text: str, rng: random.Random) -> list[int]:
        """Return some tokens of a text, cut anywhere."""
        ids: list[int] = []
        data = text.encode()
        while data:
            fitting = [token for token, raw in self._words.items() if data.startswith(raw)]
            token = rng.choice([data[0], *fitting])
            ids.append(token)
            data = data[len(self.piece(token)) :]
        return ids
