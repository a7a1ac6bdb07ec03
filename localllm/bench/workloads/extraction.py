"""`json`: facts to be taken from a text into JSON of a given schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import spread, tokens, words
from localllm.bench.workloads.prose import Prose, n_words, ordered, place, tag
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing

_HEAD = "Read the text and give the facts in it as one JSON object with exactly the fields of the schema."
_RULES = (
    "Copy names and marks as they are written.",
    "Write amounts as whole numbers.",
    "Invent nothing that the text does not say.",
    "Leave out what is only told around it.",
    "Keep the order of the text in every list.",
    "Say nothing before or after the object.",
)


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of an order."""

    item: str
    quantity: int
    price_each: int


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """An order that somebody placed."""

    number: str
    supplier_town: str
    currency: Literal["crowns", "francs", "marks"]
    lines: list[Line]
    is_paid: bool


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """A report that something is broken."""

    device: str
    part: str
    severity: Literal["low", "medium", "high"]
    n_days: int
    marks: list[str]
    needs_visit: bool


class Room(msgspec.Struct, forbid_unknown_fields=True):
    """A room of a booking."""

    kind: Literal["single", "double", "family"]
    n_nights: int


class Booking(msgspec.Struct, forbid_unknown_fields=True):
    """A stay that somebody booked."""

    reference: str
    town: str
    month: str
    rooms: list[Room]
    with_breakfast: bool


@dataclass(frozen=True, slots=True)
class JsonParameters:
    """Lengths of the texts and of the objects made of them."""

    text: int = words(60, "a text to read")
    answer: int = tokens(256, "at most the JSON object")
    spread: float = spread(0.3)


def _sessions(of: JsonParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    length = _lengths(of)["text"]
    system = {"role": "system", "content": ordered(Draws(seed, "json"), _HEAD, _RULES)}
    at = 0
    while True:
        draws = Draws(seed, "json", at)
        answer_type, told = draws.pick(_KINDS)(prose, draws)
        trade = draws.pick(prose.trades)
        around = prose.text(draws, trade, length.draw(draws) - n_words(told))
        text = " ".join(draws.shuffled([told, around])).strip()
        user = {"role": "user", "content": text}
        yield (Ask("json", of.answer, messages=(system, user), answer_type=answer_type, is_free=False),)
        at += 1


def _order(prose: Prose, draws: Draws) -> tuple[type[msgspec.Struct], str]:
    trade = draws.pick(prose.trades)
    currency = draws.pick(("crowns", "francs", "marks"))
    lines = " and ".join(
        f"{draws.between(2, 400)} {prose.phrase(draws, trade, 'goods')} at {draws.between(2, 90)} {currency} each"
        for _ in range(draws.between(1, 3))
    )
    paid = draws.pick(("It is paid.", "It is not paid yet."))
    return Order, f"Order {tag(draws)} went to our supplier in {place(draws)}: {lines}. {paid}"


def _fault(prose: Prose, draws: Draws) -> tuple[type[msgspec.Struct], str]:
    trade = draws.pick(prose.trades)
    marks = " and ".join(tag(draws) for _ in range(draws.between(1, 3)))
    visit = draws.pick(("Somebody must come and see it.", "Nobody needs to come."))
    return Fault, (
        f"The {prose.phrase(draws, trade, 'part')} of our {prose.phrase(draws, trade, 'thing')} has been "
        f"{prose.phrase(draws, trade, 'state')} for {draws.between(2, 60)} days (marks {marks}). "
        f"The severity is {draws.pick(('low', 'medium', 'high'))}. {visit}"
    )


def _booking(prose: Prose, draws: Draws) -> tuple[type[msgspec.Struct], str]:
    rooms = " and ".join(
        f"a {draws.pick(('single', 'double', 'family'))} room for {draws.between(2, 14)} nights"
        for _ in range(draws.between(1, 3))
    )
    breakfast = draws.pick(("With breakfast, please.", "We want no breakfast."))
    month = prose.phrase(draws, "harbour", "month")
    return Booking, f"Booking {tag(draws)}: we come to {place(draws)} in {month} and need {rooms}. {breakfast}"


_KINDS = (_order, _fault, _booking)


def _lengths(of: JsonParameters) -> Mapping[str, Lengths]:
    return {"text": Lengths(of.text, of.spread), "answer": Lengths(of.answer, 0, "tokens")}


def _sharing(of: JsonParameters) -> Sharing:
    before = n_words(" ".join((_HEAD, *_RULES)))
    share = before / (before + _lengths(of)["text"].mean)
    return Sharing((Shared("the instruction", "all requests", "1"),), share, share)


JSON = Recipe(
    name="json",
    effect="facts to be taken from a text into JSON of a given schema",
    parameters=JsonParameters,
    sessions=_sessions,
    n_asks=lambda of: 1,
    lengths=_lengths,
    sharing=_sharing,
)
