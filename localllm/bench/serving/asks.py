"""Chooses which asks of a workload a run sends, in which order, and under which salts: the same for the same seed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, TypeAlias, TypeVar

import msgspec

from localllm.bench.workloads.ask import Ask, Session

WINDOW = 8
"""Sessions at a time that take turns in an open loop."""

T = TypeVar("T")

Numbered: TypeAlias = tuple[int, Ask]
"""A session's number, and one ask of it."""

Salting: TypeAlias = Callable[[Ask], Ask]

_SALT_BYTES = 6


def interleaved(sessions: Iterable[Session], window: int) -> Iterator[Numbered]:
    """Yield the asks of `window` sessions at a time, a turn of each in turn; one that ends is replaced by the next.

    So turn k of a session never comes before its turn k - 1, and `window` clients have a session each.
    """
    numbered = enumerate(session for session in sessions if session)
    active = [(number, iter(session)) for number, session in islice(numbered, window)]
    while active:
        going: list[tuple[int, Iterator[Ask]]] = []
        for number, turns in active:
            ask = next(turns, None)
            if ask is not None:
                yield number, ask
                going.append((number, turns))
                continue
            following = next(numbered, None)
            if following is not None:
                number, turns = following[0], iter(following[1])
                yield number, next(turns)
                going.append((number, turns))
        active = going


def by_session(numbered: Iterable[tuple[int, T]]) -> list[list[T]]:
    """Return what belongs to each session together, sessions in the order of their first."""
    found: dict[int, list[T]] = {}
    for number, one in numbered:
        found.setdefault(number, []).append(one)
    return list(found.values())


def each_its_own() -> Salting:
    """Return what puts a text that never was before each ask: nothing computed before serves it."""
    return lambda ask: ask.salted(_new_salt())


def one_for_all() -> Salting:
    """Return what puts the same new text before every ask: they share with each other, with no earlier run."""
    salt = _new_salt()
    return lambda ask: ask.salted(salt)


def _new_salt() -> str:
    """All are as long, so prompts of runs are; their tokens may differ by one or two."""
    return secrets.token_hex(_SALT_BYTES)


def prefixes(asks: Iterable[Ask]) -> list[Ask]:
    """Return the asks that put into a cache what these begin with: each sibling once, of nested ones the longest.

    An ask that begins with nothing that could be shared needs none.
    """
    found: dict[tuple[str, ...], Ask] = {}
    for ask in asks:
        sibling = ask.sibling()
        beginning = _beginning(sibling)
        if len(beginning) > 1 or sibling.tools:
            found.setdefault(beginning, sibling)
    in_order = sorted(found)  # what begins like another stands right before one that does
    for shorter, longer in pairwise(in_order):
        if longer[: len(shorter)] == shorter:
            del found[shorter]
    return list(found.values())


def n_whole_in(asks: Iterable[Ask], sent: Iterable[Ask]) -> int:
    """Return how many asks stand whole in what `sent` siblings begin with: a later turn repeats them."""
    known = {beginning[:n] for beginning in map(_beginning, sent) for n in range(2, len(beginning) + 1)}
    return sum(_whole(ask) in known for ask in asks)


def _whole(ask: Ask) -> tuple[str, ...]:
    if ask.prompt is not None:
        return ("prompt", *ask.prompt.splitlines(keepends=True))
    return (_text(ask.tools), *(_text(message) for message in ask.messages))


def _beginning(sibling: Ask) -> tuple[str, ...]:
    """Return what a sibling shares, piece by piece: of a chat its tools and messages, of a prompt its lines."""
    return _whole(sibling) if sibling.prompt is not None else _whole(sibling)[:-1]


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def first_of_each_kind(asks: Sequence[Ask], n_each: int) -> dict[str, list[Ask]]:
    """Return the first asks of every kind, `n_each` at most."""
    found: dict[str, list[Ask]] = {}
    for ask in asks:
        some = found.setdefault(ask.kind, [])
        if len(some) < n_each:
            some.append(ask)
    return found
