"""Schemas of answers need no references, refuse other fields, and the types take what the texts say."""

from __future__ import annotations

import json
from itertools import islice

import msgspec
import pytest

from localllm.bench.workloads.ask import Ask
from localllm.bench.workloads.extraction import Booking, Fault, Order
from localllm.bench.workloads.parse import parse_workload
from localllm.bench.workloads.schema import answer_schema

VALID: dict[type[msgspec.Struct], dict[str, object]] = {
    Order: {
        "number": "KT-482",
        "supplier_town": "Velmora",
        "currency": "marks",
        "lines": [{"item": "ropes", "quantity": 4, "price_each": 12}],
        "is_paid": False,
    },
    Fault: {
        "device": "crane",
        "part": "winch",
        "severity": "low",
        "n_days": 3,
        "marks": ["AB-123"],
        "needs_visit": True,
    },
    Booking: {
        "reference": "AB-123",
        "town": "Velmora",
        "month": "May",
        "rooms": [{"kind": "double", "n_nights": 2}],
        "with_breakfast": True,
    },
}


@pytest.mark.parametrize("kind", VALID)
def test_a_schema_has_no_references_and_closes_every_object(kind: type[msgspec.Struct]) -> None:
    schema = answer_schema(kind)
    text = json.dumps(schema)
    assert "$ref" not in text
    assert "$defs" not in text
    objects = [schema]
    while objects:
        value = objects.pop()
        if value.get("type") == "object":
            assert value["additionalProperties"] is False
            assert sorted(value["required"]) == sorted(value["properties"])
            objects += value["properties"].values()
        if value.get("type") == "array":
            objects.append(value["items"])


@pytest.mark.parametrize("kind", VALID)
def test_a_right_answer_decodes_and_a_field_too_many_or_too_few_does_not(kind: type[msgspec.Struct]) -> None:
    right = VALID[kind]
    assert msgspec.to_builtins(msgspec.json.decode(json.dumps(right), type=kind)) == right
    for wrong in ({**right, "more": 1}, dict(list(right.items())[1:])):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(wrong), type=kind)


def test_the_json_workload_asks_for_every_kind_and_says_what_it_holds() -> None:
    asks: list[Ask] = [session[0] for session in islice(parse_workload("json").sessions(5), 60)]
    assert {ask.answer_type for ask in asks} == set(VALID)
    for ask in asks:
        text = ask.messages[-1]["content"]
        expected = {Order: "Order ", Fault: "The severity is ", Booking: "Booking "}
        assert ask.answer_type is not None
        assert expected[ask.answer_type] in text
        assert ask.sibling().answer_type is None
