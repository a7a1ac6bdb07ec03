"""User text is never a control token: where to cut a prompt so that no spelling the caller wrote survives.

A rendered prompt is tokenised with special parsing on, piece by piece. A piece ends inside every
control or user-defined spelling of which the caller wrote at least one character; a spelling that
the template wrote whole is never cut.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from localllm.models.template.text import Text, is_users

_SPACES = " \t\r\n\u2581"  # with SentencePiece's mark for a space


class Spellings:
    """The spellings a tokenizer would take for one token whoever wrote them.

    Runs of white space are left out: some vocabularies define them as tokens, but they control
    nothing. A single character cannot be cut and is left out too.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self._known = frozenset(text for text in spellings if len(text) > 1 and text.strip(_SPACES))
        lengths: dict[str, set[int]] = {}
        for text in self._known:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: tuple(sorted(found, reverse=True)) for head, found in lengths.items()}
        firsts = sorted({head[0] for head in lengths})
        self._longest = max(map(len, self._known), default=0)
        self._first = re.compile("[" + "".join(map(re.escape, firsts)) + "]") if firsts else None

    def found(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield every spelling [from, to) that begins in [start, end), overlapping ones too, longest first."""
        if self._first is None:
            return
        for match in self._first.finditer(text, max(0, start), end):
            at = match.start()
            for length in self._lengths.get(text[at : at + 2], ()):
                if at + length <= len(text) and text[at : at + length] in self._known:
                    yield at, at + length

    def touching(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield every spelling of which a character stands in [start, end), as `found` does."""
        return (spelling for spelling in self.found(text, start - self._longest + 1, end) if spelling[1] > start)

    def cuts(self, text: str) -> list[int]:
        """Return the positions, ascending, at which `text` must be cut; none where nobody's words are in it."""
        cuts: list[int] = []
        plain = str.__str__(text)
        for start, end in _ranges(text):
            for first, last in self.touching(plain, start, end):
                at = bisect.bisect_right(cuts, first)
                if at < len(cuts) and cuts[at] < last:
                    continue
                # Before the last of the caller's characters in it: one side of the cut is always the caller's,
                # so a spelling that the template wrote, whole, is not cut along.
                inside = min(end, last) - 1
                cuts.insert(at, inside if inside > first else first + 1)
        return cuts

    def first_end(self, text: str, start: int, end: int) -> int | None:
        """Return where the first spelling that begins in [start, end) ends."""
        return next((last for _, last in self.found(text, start, end)), None)


def _ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of the caller's characters, adjacent ones as one."""
    ranges: list[tuple[int, int]] = []
    for start, end, origin in text.spans if isinstance(text, Text) else ():
        if not is_users(origin):
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def unused_mark(text: str) -> str:
    """Return a character that does not occur in `text`: a Unicode noncharacter while one is left."""
    codes = chain(range(0xFDD0, 0xFDF0), (0xFFFE, 0xFFFF), range(0xF0000, 0x10FFFE))  # then the private planes
    return next(chr(code) for code in codes if chr(code) not in text)


def mark(text: str, cuts: list[int], character: str) -> str:
    """Put `character` at each cut."""
    plain = str.__str__(text)
    return character.join(plain[start:end] for start, end in pairwise([0, *cuts, len(text)]))
