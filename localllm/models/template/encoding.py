"""Rendered prompts to tokens: the caller's words form no control token, earlier answers keep the tokens they had.

The tokens that a model generates are not always those that their text becomes when it is tokenised. Where what
was generated is known and its text stands unchanged in the prompt, its own tokens are put there, so that the
prompt goes on exactly where the answer ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.models.template.rendered import Rendered, Stretch
from localllm.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as tokens; `boundaries` are token positions, none inside a token."""

    tokens: list[int]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that a model generated and whose text stands in a prompt at [`start`, `end`), no character changed."""

    start: int
    end: int
    ids: Sequence[int]


class Recall(Protocol):
    """Knows what was generated before. Asked about one prompt, from its beginning to its end."""

    def generated(self, prompt: Rendered, stretch: Stretch) -> Generated | None:
        """Return what was generated after the prompt up to some place, and stands in this stretch of it.

        After the very tokens: what was returned before was put into the prompt, and this will be, too.
        """
        ...


def encode(tokenizer: Tokenizer, rendered: Rendered, recall: Recall | None = None) -> Encoded:
    """Tokenise a rendered prompt: specials that the template wrote are parsed, the caller's never formed.

    BOS is added only where the vocabulary asks for it and the template did not write it. `recall`: tokens that
    were generated stand where their text does, after the very tokens they were generated after.
    """
    writer = _Writer(tokenizer, rendered)
    for stretch in rendered.answers if recall is not None else ():
        assert recall is not None
        generated = recall.generated(rendered, stretch)
        if generated is not None:
            text = rendered.text[generated.start : generated.end]
            writer.take([*writer.parts(generated.start), _Part(generated.start, text, generated.ids)])
    writer.take(writer.parts(len(rendered.text)))
    return Encoded(writer.tokens, tuple(sorted({position for position in writer.positions if position})))


@dataclass(frozen=True, slots=True)
class _Part:
    """Text without marks that begins at `at` of a prompt, and its tokens."""

    at: int
    text: str
    ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.at + len(self.text)


class _Writer:
    """Writes a prompt's tokens from left to right."""

    def __init__(self, tokenizer: Tokenizer, rendered: Rendered) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self._tokenizer = tokenizer
        self._rendered = rendered
        self._waiting = list(rendered.boundaries)
        self._at = 0  # the text before is done

    def parts(self, end: int) -> list[_Part]:
        """Return the text up to `end` that is not done yet, cut at marks, and its tokens."""
        parts: list[_Part] = []
        at = self._at
        for text in self._rendered.text[at:end].split(self._rendered.mark):
            parts.append(_Part(at, text, self._tokenizer.encode(text, parse_special=True, continues=at > 0)))
            at = parts[-1].end + len(self._rendered.mark)
        vocabulary = self._tokenizer.vocabulary
        bos = vocabulary.bos_id
        if self._at == 0 and vocabulary.add_bos and bos is not None and parts[0].ids[:1] != [bos]:
            parts.insert(0, _Part(0, "", [bos]))
        return parts

    def take(self, parts: Iterable[_Part]) -> None:
        """Append tokens, and note where messages end in them."""
        for part in parts:
            inside = [boundary - part.at for boundary in self._waiting if boundary <= part.end]
            counts = _token_counts(self._tokenizer, part.text, part.ids, inside)
            self.positions += [len(self.tokens) + n_tokens for n_tokens in counts]
            self._waiting = self._waiting[len(inside) :]
            self.tokens += part.ids
            self._at = part.end


def _token_counts(tokenizer: Tokenizer, text: str, ids: Sequence[int], offsets: list[int]) -> list[int]:
    """Return how many of `ids` lie wholly before each offset (ascending) of `text`, as far as that can be told."""
    counts: list[int] = []
    data, at, n_done = text.encode("utf-8", "surrogatepass") if offsets else b"", 0, 0
    target = n_chars = 0
    for offset in offsets:
        target += len(text[n_chars:offset].encode("utf-8", "surrogatepass"))
        n_chars = offset
        while n_done < len(ids):
            after = _after_piece(data, at, tokenizer.piece(ids[n_done]))
            if after is None:
                return counts
            if after > target:
                break
            at, n_done = after, n_done + 1
        counts.append(n_done)
    return counts


def _after_piece(data: bytes, at: int, piece: bytes) -> int | None:
    """Return where `piece` ends in `data`; a vocabulary may add a space before it or swallow spaces."""
    if data.startswith(piece, at):
        return at + len(piece)
    if piece[:1] == b" " and data.startswith(piece[1:], at):
        return at + len(piece) - 1
    skipped = at + len(data[at:]) - len(data[at:].lstrip())
    return skipped + len(piece) if skipped > at and data.startswith(piece, skipped) else None
