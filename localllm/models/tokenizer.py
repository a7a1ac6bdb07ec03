"""What the runtime needs of a vocabulary, whichever engine it came with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Frozen facts of a model's vocabulary.

    `specials`: spellings of control and user-defined tokens (user text must never become one),
    each exactly as the tokenizer matches it in text: those that it matches with special parsing off too.
    `eog_ids`: every token that ends an answer. `add_bos`: the file asks for BOS before a text.
    """

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    specials: tuple[str, ...]
    fim_ids: tuple[int, int, int] | None = None  # prefix, suffix, middle


class Tokenizer(Protocol):
    """Text to ids and back. Safe to call from any thread."""

    vocabulary: Vocabulary

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, continues: bool = False) -> list[int]:
        """Return the ids of `text`; special spellings become single ids only if `parse_special`.

        `add_bos` adds BOS only where the vocabulary asks for it and the text does not begin with it.
        `continues`: `text` goes on in the middle of other text (a chat prompt is cut inside spellings
        that its user wrote), so no space is put before it where the vocabulary (SPM) does so at a start.
        """
        ...

    def piece(self, token: int) -> bytes:
        """Return the exact bytes of one token (control tokens included); b"" for an unused id."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, specials spelled out; broken UTF-8 becomes U+FFFD."""
        ...
