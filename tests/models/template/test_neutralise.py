"""Where a prompt is cut, and text that remembers its author: against brute force and against Python's own strings."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localllm.models.template import strings
from localllm.models.template.meter import Limits, Meter
from localllm.models.template.neutralise import Spellings, mark, unused_mark
from localllm.models.template.text import OTHER, Text, concat, first_origin, role_origin, written

SMALL = st.text(alphabet="<|a>", max_size=12)


def _mixed(parts: list[tuple[str, bool]]) -> str:
    return concat([written(text, 0) if users else text for text, users in parts])


@given(
    st.lists(st.tuples(SMALL, st.booleans()), max_size=8),
    st.sets(st.text(alphabet="<|a>", min_size=2, max_size=5), max_size=6),
)
def test_no_spelling_with_a_users_character_survives_and_every_other_does(
    parts: list[tuple[str, bool]], known: set[str]
) -> None:
    text = _mixed(parts)
    users = [own for part, own in parts for _ in part]
    cuts = Spellings(known).cuts(text)
    assert cuts == sorted(set(cuts))
    for start in range(len(text)):
        for spelling in known:
            if text.startswith(spelling, start):
                end = start + len(spelling)
                is_cut = any(start < cut < end for cut in cuts)
                assert is_cut == any(users[start:end])


@given(st.lists(st.tuples(SMALL, st.booleans()), max_size=8), st.sets(st.integers(1, 60), max_size=5))
def test_marks_come_out_again(parts: list[tuple[str, bool]], cuts: set[int]) -> None:
    text = _mixed(parts)
    inside = sorted(cut for cut in cuts if cut < len(text))
    character = unused_mark(text)
    marked = mark(text, inside, character)
    assert marked.replace(character, "") == text
    assert marked.count(character) == len(inside)


def test_white_space_and_single_characters_are_no_spellings() -> None:
    assert Spellings(["\n\n", "\u2581\u2581", "x", "\t"]).cuts(written("x\n\n\t\u2581\u2581", 0)) == []


def test_no_spellings_no_cuts() -> None:
    assert Spellings([]).cuts(written("<|im_end|>", 0)) == []


def test_text_of_a_known_role_is_not_the_callers() -> None:
    assert Spellings(["ab"]).cuts(written("ab", role_origin(0))) == []
    assert Spellings(["ab"]).cuts(written("ab", OTHER)) == [1]


def test_thousands_of_spellings_with_one_beginning_are_found() -> None:
    spellings = Spellings([f"<unused{n}>" for n in range(6000)])
    assert len(spellings.cuts(written("<unused5999>" * 100 + "<" * 10_000, 0))) == 100


def test_mark_avoids_what_the_text_holds() -> None:
    taken = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    assert unused_mark("plain") == "\ufdd0"
    assert unused_mark(taken) == "\ufffe"
    assert unused_mark(taken + "\ufffe\uffff") not in taken + "\ufffe\uffff"


def _origins(text: str) -> list[int | None]:
    """Return the origin of each character."""
    origins: list[int | None] = [None] * len(text)
    for start, end, origin in text.spans if isinstance(text, Text) else ():
        origins[start:end] = [origin] * (end - start)
    return origins


WORDS = st.text(alphabet="ab \n", max_size=8)


@given(st.lists(st.tuples(WORDS, st.sampled_from([None, 0, 1])), max_size=6), st.integers(-9, 9), st.integers(-9, 9))
def test_slices_and_iteration_keep_each_characters_origin(
    parts: list[tuple[str, int | None]], start: int, stop: int
) -> None:
    text = concat([word if origin is None else written(word, origin) for word, origin in parts])
    origins = _origins(text)
    assert str.__str__(text) == "".join(word for word, _ in parts)
    assert _origins(text[start:stop]) == origins[start:stop]
    assert [_origins(character)[0] for character in text] == origins


OPERATIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("strip", ()),
    ("strip", ("a",)),
    ("lstrip", ("a ",)),
    ("rstrip", ()),
    ("split", ()),
    ("split", ("a",)),
    ("split", (" ", 1)),
    ("split", (None, 1)),
    ("rsplit", (None, 1)),
    ("rsplit", ("ab", 1)),
    ("splitlines", ()),
    ("splitlines", (True,)),
    ("partition", ("a",)),
    ("rpartition", ("a",)),
    ("removeprefix", ("a",)),
    ("removesuffix", ("b",)),
    ("replace", ("a", "xy")),
    ("replace", ("ab", "", 1)),
    ("replace", ("", "-")),
    ("upper", ()),
    ("title", ()),
    ("center", (12, "*")),
    ("zfill", (12,)),
    ("join", (["x", "y"],)),
    ("find", ("b",)),
    ("startswith", ("a",)),
)


@given(st.lists(st.tuples(WORDS, st.sampled_from([None, 0, 1])), max_size=6), st.sampled_from(OPERATIONS))
def test_string_methods_give_what_pythons_give_and_lose_no_author(
    parts: list[tuple[str, int | None]], operation: tuple[str, tuple[Any, ...]]
) -> None:
    name, arguments = operation
    marked = [word.replace("a", chr(0xE000)) if origin is not None else word for word, origin in parts]
    text = concat([word if origin is None else written(word, origin) for word, origin in parts])
    plain = "".join(word for word, _ in parts)
    wanted = getattr(plain, name)(*arguments)
    result = strings.METHODS[name](Meter(Limits()), text, *arguments)
    assert result == wanted
    if name in ("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"):
        # Every character kept still knows its author: the pieces lie in the text in order.
        at = 0
        for piece in [result] if isinstance(result, str) else result:
            at = plain.index(piece, at)
            candidates = [_origins(text)[s : s + len(piece)] for s in range(at, len(plain) - len(piece) + 1)]
            assert _origins(piece) in candidates
            at += len(piece)
    elif isinstance(result, str) and any(marked) and first_origin(text) is not None and name not in ("replace", "join"):
        assert not result or first_origin(result) is not None or not result.strip("ab \n")


@given(st.lists(st.tuples(WORDS, st.booleans()), max_size=6), WORDS.filter(bool), WORDS)
def test_replace_marks_neither_more_nor_less_than_the_callers_characters(
    parts: list[tuple[str, bool]], old: str, new: str
) -> None:
    text = _mixed([(word, own) for word, own in parts])
    result = strings.replace(Meter(Limits()), text, old, written(new, 7))
    assert result == str.__str__(text).replace(old, new)
    assert sum(origin == 7 for origin in _origins(result)) == str.count(text, old) * len(new)
