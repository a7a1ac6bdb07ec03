"""Prose has the wanted length, reads as sentences, and does not repeat itself."""

from __future__ import annotations

import re

import pytest

from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.grammar import SENTENCES
from localllm.bench.workloads.prose import Prose, n_words, ordered
from localllm.bench.workloads.words import TRADES

DRAWN = {"number", "count", "percent", "year", "tag", "name", "date"}
SPOKEN = ("statement", "question", "about", "advice", "rule", "plot")


@pytest.mark.parametrize("symbol", SPOKEN)
@pytest.mark.parametrize("trade", TRADES)
def test_every_kind_of_sentence_is_one(trade: str, symbol: str) -> None:
    prose, draws = Prose(), Draws("sentences", trade, symbol)
    for _ in range(60):
        sentence = prose.sentence(draws, trade, symbol)
        assert re.fullmatch(r"[A-Z0-9].*[.?]", sentence), sentence
        assert not re.search(r"[{}|]|  |\b[Aa] [aeiou]| ,", sentence), sentence
        assert 4 <= n_words(sentence) <= 48, sentence


def test_every_symbol_that_a_form_names_is_known_in_every_trade() -> None:
    for trade, words in TRADES.items():
        known = SENTENCES.keys() | words.keys() | DRAWN
        named = set(re.findall(r"\{(\w+)\}", " ".join([*SENTENCES.values(), *words.values()])))
        assert named <= known, trade


def test_trades_have_the_same_kinds_of_words_and_each_word_once() -> None:
    kinds = {frozenset(words) for words in TRADES.values()}
    assert len(kinds) == 1
    for words in TRADES.values():
        for text in words.values():
            items = text.split("|")
            assert len(items) == len(set(items)) >= 3
            assert all(item == item.strip() != "" for item in items)


@pytest.mark.parametrize("length", [12, 40, 200, 2_000])
def test_texts_have_the_wanted_length_on_average(length: int) -> None:
    prose = Prose()
    n = 200 if length < 500 else 6
    found = [n_words(prose.text(Draws("length", at), "harbour", length)) for at in range(n)]
    assert sum(found) / n == pytest.approx(length, rel=0.12)
    assert all(abs(words - length) <= 24 for words in found)


def test_no_words_are_no_text_and_one_word_is_one_sentence() -> None:
    assert Prose().text(Draws("none"), "clinic", 0) == ""
    assert Prose().text(Draws("none"), "clinic", -4) == ""
    assert Prose().text(Draws("one"), "clinic", 1).count(".") >= 1


def test_a_long_text_goes_on_saying_new_things() -> None:
    sentences = re.split(r"(?<=[.?]) ", Prose().text(Draws("long"), "railway", 5_000))
    assert len(set(sentences)) > 0.97 * len(sentences)


def test_an_ordered_instruction_keeps_its_rules_and_varies_with_the_seed() -> None:
    rules = ("One.", "Two.", "Three.", "Four.")
    found = {ordered(Draws(seed), "Do.", rules) for seed in range(40)}
    assert len(found) > 10
    assert all(sorted(text.split()) == ["Do.", "Four.", "One.", "Three.", "Two."] for text in found)
