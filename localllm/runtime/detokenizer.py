"""Token ids to text as they come, never cutting a character."""

from __future__ import annotations

import codecs

from localllm.models.tokenizer import Tokenizer


class Detokenizer:
    """Turns one answer's tokens into text deltas; the joined deltas are the whole text.

    Bytes that begin a character wait for the rest of it. A byte that can belong to no character
    becomes U+FFFD, as in a decode of the whole. An answer continues its prompt, so pieces are
    taken as they are: the space that begins a SentencePiece word is part of the answer, also of
    its first word (llama.cpp drops one only at the very start of a text, which is the prompt's).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is incomplete. O(1)."""
        return self._decoder.decode(self._piece(token))
