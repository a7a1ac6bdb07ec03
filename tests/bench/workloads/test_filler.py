"""Filler: the same shape, none of the text."""

from __future__ import annotations

import json
import math
import re
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.bench.workloads.filler import Filler
from localllm.bench.workloads.filler_words import words_by_length

ANY_TEXT = st.text(max_size=200)
PROSE = st.text("abcdefghij ABC,.\n\t0123_-éßжшд你好🙂", max_size=200)


def fixed() -> Filler:
    return Filler(b"k" * 32)


def grams(text: str) -> set[str]:
    """Every four letters in a row, in whatever case."""
    return {
        part.lower()[at : at + 4] for part in re.findall(r"[^\W\d_]{4,}", text) for at in range(len(part.lower()) - 3)
    }


@given(ANY_TEXT)
def test_filler_has_as_many_characters(text: str) -> None:
    assert len(Filler().text(text)) == len(text)


@given(ANY_TEXT)
def test_what_is_ascii_stays_ascii_and_of_its_kind(text: str) -> None:
    filled = fixed().text(text)
    for was, now in zip(text, filled, strict=True):
        assert was.isascii() == now.isascii()
        if was.isascii():
            assert (was.isalpha(), was.isdigit(), was.isupper()) == (now.isalpha(), now.isdigit(), now.isupper())
            assert was == now or was.isalnum()


@given(st.text("abcdefghijklmnopqrstuvwxyzABCÄÖéжшдαβ", min_size=4, max_size=60))
def test_no_four_letters_of_a_run_survive_in_it(word: str) -> None:
    assert not grams(word) & grams(Filler().text(word))


@pytest.mark.parametrize("canary", ["xqzvkwjx", "QXZVKWJX", "zqxjkv0zqxjkv", "Жшщъыэюя", "你好世界和平", "ΞΨΩφχζ"])
def test_canaries_are_gone(canary: str) -> None:
    text = f"before {canary} and {canary}s, {canary[:6]}"
    filled = Filler().text(text)
    assert not any(canary.lower()[at : at + 4] in filled.lower() for at in range(len(canary) - 3))


@given(PROSE, PROSE)
def test_a_prefix_that_ends_with_a_word_stays_a_prefix(head: str, tail: str) -> None:
    filler = Filler()
    assert filler.text(f"{head} {tail}").startswith(filler.text(f"{head} "))


@given(PROSE, PROSE)
def test_texts_share_as_much_as_they_did_up_to_the_word(one: str, other: str) -> None:
    filler = Filler()
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    whole = len(re.sub(r"[A-Za-z\u00aa-\u0dff]+$|[0-9]+$", "", one[:n_same]))
    assert filler.text(one)[:whole] == filler.text(other)[:whole]


def test_a_text_without_spaces_keeps_its_prefix_too() -> None:
    filler = Filler()
    assert filler.text("你好世界和平").startswith(filler.text("你好世"))


def test_equal_words_have_equal_filler_in_a_recording_and_another_in_the_next() -> None:
    one, again, another = Filler(), Filler(), Filler()
    text = "the lantern stands beside another lantern, and the harbour sleeps behind its lantern"
    words = one.text(text).split()
    assert words[1] == words[5].rstrip(",") == words[-1]
    assert one.text(text) == one.text(text)
    assert len({filler.text(text) for filler in (one, again, another)}) == 3


def test_case_layout_and_digits_keep_their_pattern() -> None:
    filled = fixed().text("Hello, WORLD!\n\tfoo_bar(42) -> 3.14")
    assert re.fullmatch(r"[A-Z][a-z]{4}, [A-Z]{5}!\n\t[a-z]{3}_[a-z]{3}\(\d\d\) -> \d\.\d\d", filled)


def test_what_templates_write_stays() -> None:
    filled = fixed().text("<|im_start|>user\nsecret<|im_end|>\n<think>")
    assert filled.startswith("<|im_start|>")
    assert filled.endswith("<|im_end|>\n<think>")
    assert "secret" not in filled


def test_scripts_stay_themselves_and_signs_stay() -> None:
    filled = fixed().text("Привет — γειά → 你好 かな カナ 한국")
    assert re.fullmatch(r"[А-Я][а-я]{5} — [α-ω]{4} → [一-鿿]{2} [ぁ-ん]{2} [ァ-ン]{2} [가-힣]{2}", filled)


def test_filler_is_cut_into_about_as_many_pieces_as_words_are() -> None:
    # Letters drawn one by one would be; a word of the list is one token with most tokenizers.
    known = set().union(*words_by_length().values())
    filled = fixed().text("Before anything was measured the harbour master counted every single boat twice")
    assert all(word.lower() in known for word in filled.split())


@given(st.dictionaries(st.text(max_size=12), st.text(max_size=12) | st.integers() | st.booleans() | st.none()))
def test_json_in_a_string_stays_json_of_the_same_shape(value: dict[str, object]) -> None:
    filled = json.loads(Filler().text_or_json(json.dumps(value)))
    assert len(filled) == len(value)
    assert [type(one) for one in filled.values()] == [type(one) for one in value.values()]


def test_json_keeps_its_spaces_and_its_numbers_their_length() -> None:
    filled = fixed().text_or_json('{"city": "Rome",\n  "n": [0.25, -17, 1200, true, null]}')
    assert re.fullmatch(
        r'\{"[a-z]{4}": "[A-Z][a-z]{3}",\n  "[a-z]": \[0\.\d{1,2}, -\d\d, \d{4}, true, null\]\}', filled
    )
    assert "Rome" not in filled
    assert "1200" not in filled


def test_what_only_looks_like_json_is_text() -> None:
    assert len(fixed().text_or_json("{secret")) == 7
    deep = "[" * 5000
    assert fixed().text_or_json(deep) == deep


@given(st.lists(st.text("abcxyz_", min_size=1, max_size=3), unique=True, max_size=40))
def test_names_stay_different(names: list[str]) -> None:
    filler = Filler()
    assert len({filler.name(name) for name in names}) == len(names)
    assert [filler.name(name) for name in names] == [filler.name(name) for name in names]


@pytest.mark.parametrize("number", [0, 7, -12, 123456, 0.5, -3.25, 1e300, 1.5e-7, float("inf"), float("nan")])
def test_numbers_keep_their_kind(number: float) -> None:
    filled = fixed().number(number)
    if math.isfinite(number):
        assert type(filled) is type(number)
        assert (filled < 0) == (number < 0)
        assert len(repr(filled)) <= len(repr(number))
    else:
        assert filled == 0
