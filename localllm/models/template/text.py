"""Text that remembers who wrote which of its characters, through everything a template does with it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

Span: TypeAlias = tuple[int, int, int]
"""Characters [start, end) of a text and their origin."""

OTHER = -1
"""Origin of what the caller wrote outside messages: tool schemas and template arguments."""


def role_origin(index: int) -> int:
    """Return the origin of the well-known role name of message `index`: placed, yet not the caller's words."""
    return -2 - index


def is_users(origin: int) -> bool:
    """Tell whether the caller wrote the characters of this origin."""
    return origin >= OTHER


def message_of(origin: int) -> int | None:
    """Return the index of the message that characters of this origin belong to."""
    if origin == OTHER:
        return None
    return origin if origin >= 0 else -2 - origin


class Text(str):
    """A string some of whose characters the caller wrote; `spans` says which, in order, disjoint.

    Compares, hashes and searches as the plain string, so a template sees what it would see anyway.
    Operations that Python performs outside `concat`, `cut` and `whole` return plain strings.
    """

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...]) -> Text:
        self = super().__new__(cls, text)
        self.spans = spans
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            at = key.__index__()
            super().__getitem__(at)  # raises where Python does
            return cut(self, at % len(self), at % len(self) + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return cut(self, start, stop)
        return whole(super().__getitem__(key), self)

    def __iter__(self) -> Iterator[str]:
        return (cut(self, at, at + 1) for at in range(len(self)))


class NullText(Text):
    """The content of a turn that has none (a tool call): an empty text that the test `none` recognises."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = Text.__hash__


def cost(text: str) -> int:
    """Return the characters an operation on `text` is counted as: its origins take room and time too."""
    return len(text) + (32 * len(text.spans) if isinstance(text, Text) else 0)


def written(text: str, origin: int) -> Text:
    """Return `text` as written by one origin."""
    return Text(text, ((0, len(text), origin),) if text else ())


def concat(pieces: Iterable[str]) -> str:
    """Join strings, keeping every origin; a plain string where nothing is the caller's."""
    pieces = pieces if isinstance(pieces, (list, tuple)) else list(pieces)
    joined = "".join(pieces)
    spans: list[Span] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Text):
            if len(piece) == len(joined):
                return piece
            for start, end, origin in piece.spans:
                if spans and spans[-1][1] == start + at and spans[-1][2] == origin:
                    spans[-1] = (spans[-1][0], end + at, origin)
                else:
                    spans.append((start + at, end + at, origin))
        at += len(piece)
    return Text(joined, tuple(spans)) if spans else joined


def cut(text: str, start: int, end: int) -> str:
    """Return text[start:end] (0 <= start, end <= length) with its origins."""
    if not isinstance(text, Text):
        return text[start:end]
    if start <= 0 and end >= len(text):
        return text
    spans = text.spans
    at = max(0, bisect.bisect_left(spans, (start,)) - 1)
    inside = []
    while at < len(spans) and spans[at][0] < end:
        first, last, origin = spans[at]
        if last > start:
            inside.append((max(first, start) - start, min(last, end) - start, origin))
        at += 1
    return Text(str.__getitem__(text, slice(start, end)), tuple(inside))


def whole(result: str, *sources: Any) -> str:
    """Return `result`, all of it the caller's if any text inside `sources` holds caller's characters.

    For operations that move characters about: what cannot be told apart counts as the caller's.
    """
    origin = first_origin(sources)
    return result if origin is None or not result else Text(result, ((0, len(result), origin),))


def first_origin(value: Any) -> int | None:
    """Return an origin found in a value (nested, acyclic), the caller's before a role's."""
    found: int | None = None
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Text):
            for _, _, origin in value.spans:
                if is_users(origin):
                    return origin
                found = origin
        elif isinstance(value, Mapping):
            waiting.extend(value.keys())
            waiting.extend(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, (str, range)):
            waiting.extend(value)
    return found
