"""Remembers which tokens a model generated after which prompt, so that the next turn begins with exactly these.

What stands here never leaves the process, and is found only after the very prompt, text and tokens alike, that
an answer followed, by requests of the same root. A forgotten answer costs a few tokens that are computed again.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import TypeAlias

from localllm.models.template.encoding import Generated
from localllm.models.template.neutralise import Spellings
from localllm.models.template.rendered import Rendered, Stretch
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.kv.blocks import Root

MAX_BYTES = 16 << 20
_DIGEST_BYTES = 16
_ENTRY_BYTES = 500  # beside its text and tokens, about what an answer costs
_CONTROL_BYTES = 150  # and each control token in it
_MAX_ALIKE = 64  # answers that are looked at, of those after one prompt that begin with the same words
_MAX_OPENING_CHARS = 1024  # of a template, between the message before an answer and the answer
_CUT, _TAKEN = b"\xfe", b"\xff"  # in no UTF-8: a mark of the prompt; what was generated, and put there

Place: TypeAlias = tuple[int, bytes]
"""A prompt: the characters of its text, and a digest of that and of the generated tokens that were put there.

Both together make the prompt's tokens, so that two prompts of one place have the same ones.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated after a prompt, and how it reads. Of two that read the same one is kept.

    `controls`: its control tokens, each with the bytes before it; spelled in letters they read the same.
    """

    place: Place
    told: str
    controls: tuple[tuple[int, int], ...]
    ids: array[int] = field(compare=False)

    @property
    def n_bytes(self) -> int:
        """About what it costs to keep."""
        n_bytes = sys.getsizeof(self.told) + self.ids.itemsize * len(self.ids)
        return _ENTRY_BYTES + n_bytes + _CONTROL_BYTES * len(self.controls)


class AnswerMemory:
    """The tokens of recent answers of one model. Thread safe; `max_bytes` bounds it, the least recently used go first.

    However many answers a prompt had, those that begin with given words are found by bisection.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int = MAX_BYTES) -> None:
        self.tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._secret = os.urandom(32)
        self._lock = threading.Lock()
        self._answers: OrderedDict[Answer, None] = OrderedDict()  # the least recently used first
        self._at: dict[Place, list[Answer]] = {}  # by how they read
        self._lengths: Counter[int] = Counter()  # of the prompts' texts, in characters
        self._n_bytes = 0
        self._specials = frozenset(spelling.encode() for spelling in tokenizer.vocabulary.specials)
        self._spellings = Spellings(tokenizer.vocabulary.specials)

    @property
    def n_bytes(self) -> int:
        """About what is held."""
        return self._n_bytes

    def recall(self, root: Root) -> Recollection:
        """Return what the requests of a root may know, for one prompt."""
        name = repr(root).encode("utf-8", "backslashreplace")
        return Recollection(self, hashlib.blake2b(name, key=self._secret, digest_size=_DIGEST_BYTES))

    def keep(self, place: Place, ids: Sequence[int]) -> None:
        """Remember an answer as the most recently used.

        Where one that reads the same is known, its tokens stay the ones: chats have gone on after them.
        """
        answer = Answer(place, self.tokenizer.decode(ids), self._controls(ids), array("i", ids))
        with self._lock:
            if answer in self._answers:
                self._answers.move_to_end(answer)
                return
            if answer.n_bytes > self._max_bytes:
                return
            if place not in self._at:
                self._lengths[place[0]] += 1
            insort(self._at.setdefault(place, []), answer, key=_TOLD)
            self._answers[answer] = None
            self._n_bytes += answer.n_bytes
            while self._n_bytes > self._max_bytes:
                self._drop(next(iter(self._answers)))

    def used(self, answer: Answer) -> None:
        """Make an answer the most recently used."""
        with self._lock:
            if answer in self._answers:
                self._answers.move_to_end(answer)

    def clear(self) -> None:
        """Forget every answer."""
        with self._lock:
            self._answers.clear()
            self._at.clear()
            self._lengths.clear()
            self._n_bytes = 0

    def lengths(self, earliest: int, latest: int) -> list[int]:
        """Return the lengths in [earliest, latest], ascending, of texts that answers followed."""
        with self._lock:
            if not self._lengths:
                return []
            return [length for length in range(earliest, latest + 1) if length in self._lengths]

    def beginning(self, place: Place, words: str) -> list[Answer]:
        """Return answers that followed a prompt and begin with these words, the shortest first; a few at most."""
        with self._lock:
            held = self._at.get(place, [])
            first = bisect_left(held, words, key=_TOLD)
            return list(takewhile(lambda one: one.told.startswith(words), held[first : first + _MAX_ALIKE]))

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

    def _controls(self, ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the control tokens among `ids`, each with the bytes before it."""
        at, found = 0, list[tuple[int, int]]()
        for token in ids:
            piece = self.tokenizer.piece(token)
            if piece in self._specials:
                found.append((at, token))
            at += len(piece)
        return tuple(found)

    def _drop(self, answer: Answer) -> None:
        """Forget an answer. Called under the lock."""
        place, held = answer.place, self._at[answer.place]
        del self._answers[answer]
        del held[held.index(answer, bisect_left(held, answer.told, key=_TOLD))]
        self._n_bytes -= answer.n_bytes
        if not held:
            del self._at[place]
            self._lengths[place[0]] -= 1
            if not self._lengths[place[0]]:
                del self._lengths[place[0]]


class Recollection:
    """What is known of one prompt: asked while it is encoded, told its end, then what was generated after it.

    Implements `models.template.encoding.Recall`. One thread at a time.
    """

    def __init__(self, memory: AnswerMemory, state: hashlib.blake2b) -> None:
        self._memory = memory
        self._state, self._n_chars = state, 0  # of the prompt so far, and the characters that are in it
        self._taken_end = 0
        self._end: Place | None = None

    def generated(self, prompt: Rendered, stretch: Stretch) -> Generated | None:
        """Return what was generated after a beginning of the prompt, where all of the stretch's words are its words.

        The caller may have cut the answer short, and a template may trim it; what is left must be unchanged.
        """
        earliest = max(stretch.earliest, stretch.first - _MAX_OPENING_CHARS, self._n_chars, self._taken_end)
        for start in self._memory.lengths(earliest, stretch.first):
            answers = self._memory.beginning(self._place(prompt, start), prompt.text[start : stretch.last])
            standing = ((one, self._standing(one, prompt.text, start, stretch)) for one in answers)
            found = [(one, generated) for one, generated in standing if generated is not None]
            if found:
                answer, generated = max(found, key=lambda pair: pair[1].end)
                self._memory.used(answer)
                self._take(generated)
                return generated
        return None

    def ends(self, prompt: Rendered) -> None:
        """Take note of the whole prompt."""
        self._end = self._place(prompt, len(prompt.text))

    def keep(self, ids: Sequence[int]) -> None:
        """Remember what was generated after the prompt, one choice of it; an end token is no part of a text."""
        if self._end is None:
            return
        ids = ids[:-1] if ids and ids[-1] in self._memory.tokenizer.vocabulary.eog_ids else ids
        if ids:
            self._memory.keep(self._end, ids)

    def _place(self, prompt: Rendered, n_chars: int) -> Place:
        """Return the place of the first `n_chars`, which are no fewer than at the last call."""
        text = prompt.text[self._n_chars : n_chars].encode("utf-8", "surrogatepass")
        self._state.update(text.replace(prompt.mark.encode(), _CUT))
        self._n_chars = n_chars
        return n_chars, self._state.digest()

    def _take(self, generated: Generated) -> None:
        """Take note that these tokens stand in the prompt from here on."""
        head = array("q", (generated.end - generated.start, len(generated.ids)))
        self._state.update(_TAKEN + head.tobytes() + array("i", generated.ids).tobytes())
        self._taken_end = generated.end

    def _standing(self, answer: Answer, text: str, start: int, stretch: Stretch) -> Generated | None:
        """Return as many tokens of an answer as stand at `start` of the text, unchanged; None = not all words do."""
        told = answer.told
        n_common = _n_common(told, text[start : min(stretch.until, start + len(told))])
        if n_common < stretch.last - start:
            return None
        for end in (start + n_common, stretch.last):
            if n_common == len(told) == end - start and "\ufffd" not in told:
                n_ids, n_chars = len(answer.ids), n_common
            else:
                n_ids, n_chars = self._n_whole(answer.ids, text[start:end])
            found = Generated(start, start + n_chars, answer.ids[:n_ids])
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


_TOLD = attrgetter("told")


def _n_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return bisect_left(range(1, most + 1), True, key=lambda n: one[:n] != other[:n])
