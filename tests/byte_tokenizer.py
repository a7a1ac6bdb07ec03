"""A tokenizer without a model, for every test that needs one with control tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.models.tokenizer import Vocabulary

N_BYTES = 256


class ByteTokenizer:
    """Bytes are tokens; the control spellings follow them, ids from 256.

    `bos`, `eos`, `fim` (prefix, suffix, middle): spellings among the specials, or none. `adds_space`: as
    SentencePiece does at a start.
    """

    def __init__(
        self,
        specials: Sequence[str],
        *,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        adds_space: bool = False,
        fim: Sequence[str] = (),
    ) -> None:
        self._ids = {spelling: N_BYTES + index for index, spelling in enumerate(specials)}
        self._spellings = {token: spelling for spelling, token in self._ids.items()}
        self._adds_space = adds_space
        longest_first = sorted(map(re.escape, specials), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(longest_first) + ")") if specials else re.compile("(?!)")
        eos_id = self._ids.get(eos)
        before, after, middle = (self._ids[spelling] for spelling in fim) if fim else (0, 0, 0)
        self.vocabulary = Vocabulary(
            n_vocab=N_BYTES + len(specials),
            bos_id=self._ids.get(bos),
            eos_id=eos_id,
            eog_ids=frozenset() if eos_id is None else frozenset({eos_id}),
            add_bos=add_bos,
            specials=tuple(specials),
            fim_ids=(before, after, middle) if fim else None,
        )

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, continues: bool = False) -> list[int]:
        """Return bytes as ids, specials as theirs where asked for."""
        ids: list[int] = []
        for at, part in enumerate(self._pattern.split(text) if parse_special else [text]):
            if at % 2:
                ids.append(self._ids[part])
            elif part:
                ids += (" " + part if self._adds_space and not (continues and at == 0) else part).encode()
        bos = self.vocabulary.bos_id
        return [bos, *ids] if add_bos and self.vocabulary.add_bos and bos is not None and ids[:1] != [bos] else ids

    def piece(self, token: int) -> bytes:
        """Return a token's bytes."""
        return bytes([token]) if token < N_BYTES else self._spellings[token].encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def control(self, tokens: Sequence[int]) -> list[str]:
        """Return the spellings of the control tokens among `tokens`, in order."""
        return [self._spellings[token] for token in tokens if token >= N_BYTES]
