"""English sentences of a wanted length about one of several trades, made from the lists of words and grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.grammar import SENTENCES
from localllm.bench.workloads.words import TRADES

# One alternative: literal text and names of symbols in turn, text first.
_Form: TypeAlias = tuple[str, ...]

_SYMBOL = re.compile(r"\{(\w+)\}")
_AN = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
_HEADS = ("Tarn", "Vel", "Brod", "Osk", "Lim", "Har", "Quel", "Stav", "Mor", "Ind", "Fenn", "Zal", "Ruth", "Cass")
_MIDDLES = ("", "a", "en", "o", "ing", "er", "i")
_NEAR_WORDS = 30  # as near to the end, the sentence that fits best of so many is taken
_TRIES = 4
_TAILS = ("wick", "mora", "feld", "by", "stead", "hollow", "gate", "borg", "mere", "combe", "lund", "nes")


class Prose:
    """Writes sentences. Holds the grammar taken apart; every text comes from the draws it is given."""

    def __init__(self) -> None:
        common = _forms(SENTENCES)
        self._rules: Mapping[str, Mapping[str, Sequence[_Form]]] = {
            trade: {**common, **_forms(words)} for trade, words in TRADES.items()
        }
        self._drawn: Mapping[str, Callable[[Draws], str]] = {
            "number": lambda draws: str(draws.between(2, 95)),
            "count": lambda draws: str(draws.between(12, 4_800)),
            "percent": lambda draws: str(draws.between(3, 88)),
            "year": lambda draws: str(draws.between(1871, 2024)),
            "tag": tag,
            "name": place,
            "date": lambda draws: f"{draws.between(1, 28)} {self.phrase(draws, 'harbour', 'month')}",
        }

    @property
    def trades(self) -> tuple[str, ...]:
        """What can be written about."""
        return tuple(self._rules)

    def phrase(self, draws: Draws, trade: str, symbol: str) -> str:
        """Return one of the alternatives of a symbol, written out."""
        if symbol in self._drawn:
            return self._drawn[symbol](draws)
        return self._expanded(draws, trade, draws.pick(self._rules[trade][symbol]))

    def sentence(self, draws: Draws, trade: str, symbol: str = "statement") -> str:
        """Return a sentence of a kind, with a capital letter at its beginning."""
        return _polished(self.phrase(draws, trade, symbol))

    def filled_in(self, draws: Draws, trade: str, form: str) -> str:
        """Return the sentence that `form` ("the {part} was {state}.") becomes."""
        return _polished(self._expanded(draws, trade, tuple(_SYMBOL.split(form))))

    def text(self, draws: Draws, trade: str, n_words: int, symbol: str = "statement") -> str:
        """Return sentences of `n_words` together, to within half a sentence: one at least, none for 0 words."""
        return " ".join(filled(lambda: self.sentence(draws, trade, symbol), n_words))

    def _expanded(self, draws: Draws, trade: str, form: _Form) -> str:
        if len(form) == 1:
            return form[0]
        return "".join(self.phrase(draws, trade, part) if at % 2 else part for at, part in enumerate(form))


def filled(make: Callable[[], str], n_words: int) -> list[str]:
    """Return pieces of text that `make` gives, about `n_words` together: one at least, none for 0 words."""
    pieces: list[str] = []
    missing = n_words
    while missing > 0:
        n_tried = _TRIES if missing < _NEAR_WORDS else 1
        piece = min((make() for _ in range(n_tried)), key=lambda text: abs(missing - text.count(" ")))
        length = piece.count(" ") + 1
        if pieces and length > 2 * missing:
            break
        pieces.append(piece)
        missing -= length
    return pieces


def place(draws: Draws) -> str:
    """Return the name of a place that there is not."""
    return draws.pick(_HEADS) + draws.pick(_MIDDLES) + draws.pick(_TAILS)


def tag(draws: Draws) -> str:
    """Return a mark such as files and parts have ("KT-482")."""
    letters = "ABCDEFGHKLMNPRSTVX"
    return f"{draws.pick(letters)}{draws.pick(letters)}-{draws.between(100, 999)}"


def ordered(draws: Draws, head: str, rules: Sequence[str]) -> str:
    """Return an instruction: `head`, then `rules` in an order of chance, so that each seed has its own."""
    return " ".join([head, *draws.shuffled(rules)])


def n_words(text: str) -> int:
    """Return how many words `text` has: what white space separates."""
    return len(text.split())


def _polished(text: str) -> str:
    text = _AN.sub(r"\1n ", text)
    return text[:1].upper() + text[1:]


def _forms(rules: Mapping[str, str]) -> dict[str, tuple[_Form, ...]]:
    return {name: tuple(tuple(_SYMBOL.split(form)) for form in text.split("|")) for name, text in rules.items()}
