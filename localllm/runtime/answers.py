"""Remembers which tokens a model generated after which prompt, so that the next turn begins with exactly these.

What stands here never leaves the process, and is found only after the very prompt, text and tokens alike, that
an answer followed, by requests of the same root. A forgotten answer costs a few tokens that are computed again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from localllm.models.template.encoding import Generated
from localllm.models.template.neutralise import Spellings
from localllm.models.template.rendered import Stretch
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.kv.blocks import Root

MAX_BYTES = 16 << 20
_DIGEST_BYTES = 16
_ENTRY_BYTES = 500  # beside its tokens, about what an answer costs
_MAX_ANSWERS = 16  # after one prompt
_MAX_OPENING_CHARS = 1024  # of a template, between the message before an answer and the answer

Place: TypeAlias = tuple[int, bytes]
"""A prompt's text: its characters, and their digest."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was generated after a prompt of these tokens (their number and digest)."""

    prompt: tuple[int, bytes]
    ids: array[int]


class AnswerMemory:
    """The tokens of recent answers of one model. Thread safe; `max_bytes` bounds it, the oldest go first."""

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self.tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._secret = os.urandom(32)
        self._lock = threading.Lock()
        self._answers: OrderedDict[Place, tuple[_Answer, ...]] = OrderedDict()  # of a place, newest first
        self._lengths: Counter[int] = Counter()  # of the texts that answers followed, in characters
        self._n_bytes = 0
        self._specials = frozenset(spelling.encode() for spelling in tokenizer.vocabulary.specials)
        self._spellings = Spellings(tokenizer.vocabulary.specials)

    @property
    def n_bytes(self) -> int:
        """About what is held."""
        return self._n_bytes

    def recall(self, root: Root) -> Recollection:
        """Return what the requests of a root may know, for one prompt."""
        state = hashlib.blake2b(repr(root).encode("utf-8", "backslashreplace"), key=self._secret, digest_size=16)
        return Recollection(self, state)

    def keep(self, place: Place, answer: _Answer) -> None:
        """Remember an answer; the same one again is the newest again."""
        with self._lock:
            held = self._answers.pop(place, ())
            self._count(place, held, -1)
            kept = (answer, *(other for other in held if other != answer))[:_MAX_ANSWERS]
            self._answers[place] = kept
            self._count(place, kept, 1)
            while self._n_bytes > self._max_bytes and self._answers:
                self._count(*self._answers.popitem(last=False), -1)

    def clear(self) -> None:
        """Forget every answer."""
        with self._lock:
            self._answers.clear()
            self._lengths.clear()
            self._n_bytes = 0

    def lengths(self, earliest: int, latest: int) -> list[int]:
        """Return the lengths in [earliest, latest], ascending, of texts that answers followed."""
        with self._lock:
            if not self._lengths:
                return []
            return [length for length in range(earliest, latest + 1) if length in self._lengths]

    def after(self, place: Place) -> tuple[_Answer, ...]:
        """Return the answers that followed a text, newest first; they are kept the longer for it."""
        with self._lock:
            if place in self._answers:
                self._answers.move_to_end(place)
            return self._answers.get(place, ())

    def keeps_controls(self, text: str, found: Generated) -> bool:
        """Say whether the control tokens of a text stay where they are, and what they are, with what was generated.

        Only the template's are whole in `text`; but a model may have spelled one in letters, or a part of one.
        """
        spellings = list(self._spellings.touching(text, found.start, found.end))
        if not spellings:
            return True
        if any(first < found.start or last > found.end for first, last in spellings):
            return False
        usual = self.tokenizer.encode(text[found.start : found.end], parse_special=True, continues=True)
        return self._controls(usual) == self._controls(found.ids)

    def _controls(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the control tokens among `ids`, each with the bytes before it."""
        at, found = 0, list[tuple[int, int]]()
        for token in ids:
            piece = self.tokenizer.piece(token)
            if piece in self._specials:
                found.append((at, token))
            at += len(piece)
        return found

    def _count(self, place: Place, answers: tuple[_Answer, ...], sign: int) -> None:
        if not answers:
            return
        self._n_bytes += sign * sum(_ENTRY_BYTES + 4 * len(answer.ids) for answer in answers)
        self._lengths[place[0]] += sign
        if not self._lengths[place[0]]:
            del self._lengths[place[0]]


class Recollection:
    """What is known of one prompt: asked while it is encoded, told its end, then what was generated after it.

    Implements `models.template.encoding.Recall`. One thread at a time.
    """

    def __init__(self, memory: AnswerMemory, state: hashlib.blake2b) -> None:
        self._memory = memory
        self._text_state, self._n_chars = state, 0
        self._ids_state, self._n_ids = state.copy(), 0
        self._end: tuple[Place, tuple[int, bytes]] | None = None

    def generated(self, text: str, stretch: Stretch) -> Iterator[Generated]:
        """Yield what was generated after a beginning of `text`, where all of the stretch's words are its words.

        The caller may have cut the answer short, and a template may trim it; what is left must be unchanged.
        """
        earliest = max(stretch.earliest, stretch.first - _MAX_OPENING_CHARS, self._n_chars)
        for start in self._memory.lengths(earliest, stretch.first):
            answers = self._memory.after((start, self._text_digest(text, start)))
            found = [g for answer in answers if (g := self._standing(answer, text, start, stretch)) is not None]
            yield from sorted(found, key=lambda generated: -generated.end)

    def confirms(self, generated: Generated, tokens: Sequence[int], more: Sequence[int]) -> bool:
        """Say whether it was generated after exactly `tokens` and `more`."""
        if generated.prompt[0] != len(tokens) + len(more):
            return False
        state = self._ids_state.copy()
        state.update(_packed(tokens[self._n_ids :]))
        state.update(_packed(more))
        if state.digest() != generated.prompt[1]:
            return False
        self._ids_state, self._n_ids = state, len(tokens) + len(more)
        return True

    def ends(self, text: str, tokens: Sequence[int]) -> None:
        """Take note of the whole prompt."""
        self._ids_state.update(_packed(tokens[self._n_ids :]))
        self._end = (len(text), self._text_digest(text, len(text))), (len(tokens), self._ids_state.digest())

    def keep(self, ids: Sequence[int]) -> None:
        """Remember what was generated after the prompt, one choice of it; an end token is no part of a text."""
        if self._end is None:
            return
        ids = ids[:-1] if ids and ids[-1] in self._memory.tokenizer.vocabulary.eog_ids else ids
        if ids:
            self._memory.keep(self._end[0], _Answer(self._end[1], array("i", ids)))

    def _text_digest(self, text: str, n_chars: int) -> bytes:
        """Return the digest of the first `n_chars`, which are no fewer than at the last call."""
        self._text_state.update(text[self._n_chars : n_chars].encode("utf-8", "surrogatepass"))
        self._n_chars = n_chars
        return self._text_state.digest()

    def _standing(self, answer: _Answer, text: str, start: int, stretch: Stretch) -> Generated | None:
        """Return as many tokens of an answer as stand at `start` of the text, unchanged; None = not all words do."""
        told = self._memory.tokenizer.decode(answer.ids)
        n_common = _n_common(told, text[start : min(stretch.until, start + len(told))])
        if n_common < stretch.last - start:
            return None
        for end in (start + n_common, stretch.last):
            if n_common == len(told) == end - start and "\ufffd" not in told:
                n_ids, n_chars = len(answer.ids), n_common
            else:
                n_ids, n_chars = self._n_whole(answer.ids, text[start:end])
            found = Generated(start, start + n_chars, answer.ids[:n_ids], answer.prompt)
            if n_ids and self._memory.keeps_controls(text, found):
                return found
        return None

    def _n_whole(self, ids: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many of `ids` spell a beginning of `text` that cuts no character, and its characters."""
        data, at, whole = text.encode("utf-8", "surrogatepass"), 0, (0, 0)
        for n_ids, token in enumerate(ids, start=1):
            piece = self._memory.tokenizer.piece(token)
            if not data.startswith(piece, at):
                break
            at += len(piece)
            if at == len(data) or data[at] & 0xC0 != 0x80:
                whole = n_ids, at
        return whole[0], len(data[: whole[1]].decode("utf-8", "surrogatepass"))


def _n_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return bisect_left(range(1, most + 1), True, key=lambda n: one[:n] != other[:n])


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
