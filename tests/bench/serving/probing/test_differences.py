"""Differences: told in sentences that name who does what; those that make times incomparable forbid a ranking."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from localllm.bench.serving.probing.differences import Difference, differences
from localllm.bench.serving.probing.greedy import Greedy, Step, is_nearly, parting
from localllm.bench.serving.probing.probes import Probes

STEPS = (Step("on"), Step("ce", ("to",)), Step(" up"))
SAME = Probes(
    prompt_tokens=(31, 60, 40, 50),
    greedy=(Greedy("once up", "length", STEPS), Greedy("two", "stop")),
    short=(Greedy("12"), Greedy("yes")),
    exact=("12", "yes"),
    n_right=2,
    sampling="greedy",
    max_tokens="honoured",
    stop="honoured",
    ignore_eos="honoured",
    json_schema="honoured",
    offered_tools="honoured",
    forced_tools="honoured",
    stream_equals_whole=True,
    has_usage=True,
    has_stream_usage=True,
    has_cached_tokens=True,
)
TIED = Greedy("onto up", "length", (Step("on"), Step("to", ("ce",)), Step(" up")))
SURE = Greedy("onto up", "length", (Step("on"), Step("to"), Step(" up")))


def found(**more: Any) -> list[Difference]:
    return differences({"ours": SAME, "theirs": replace(SAME, **more)})


def test_equal_candidates_and_one_alone_differ_in_nothing() -> None:
    assert found() == []
    assert differences({"a": SAME}) == []
    assert differences({}) == []
    assert differences({"a": Probes(), "b": Probes()}) != []  # neither answered: nothing is known to be equal


FORBID = [
    ({"prompt_tokens": (31, 62, 40, 50)}, r"Prompt tokens of probe 2: ours counts 60; theirs counts 62"),
    ({"prompt_tokens": (None,) * 4}, r"theirs tells no prompt tokens"),
    ({"greedy": (SURE, SAME.greedy[1])}, r"answers of ours and theirs to probe 1 part after 2 characters\."),
    ({"greedy": (SAME.greedy[0], Greedy("too", "stop"))}, r"to probe 2 part after 1 characters\."),
    ({"greedy": (SAME.greedy[0], None)}, r"theirs gives no answer to probe 2"),
    ({"greedy": (replace(SAME.greedy[0], repeats=False), SAME.greedy[1])}, r"theirs gives another answer to the same"),
    ({"exact": ("13", "yes"), "short": (Greedy("13"), Greedy("yes")), "n_right": 1}, r"1 of 2 short answers differ \("),
    ({"max_tokens": "ignored"}, r"theirs does not honour max_tokens"),
    ({"stream_equals_whole": False}, r"theirs: the answer streamed is another"),
]


@pytest.mark.parametrize(("more", "sentence"), FORBID)
def test_what_makes_times_incomparable_forbids_a_ranking(more: dict[str, Any], sentence: str) -> None:
    told = found(**more)
    assert told[0].forbids_ranking
    assert re.search(sentence, told[0].sentence), told


TELL = [
    ({"prompt_tokens": (31, 60, 40, 70)}, "control_tokens", r"spells control tokens: ours counts 50; theirs counts 70"),
    ({"greedy": (TIED, SAME.greedy[1])}, "near_tie", r"part after 2 characters, where two tokens are within 0\.5 nats"),
    ({"greedy": (replace(SAME.greedy[0], finish_reason="stop"), SAME.greedy[1])}, "finish_reason", "length; theirs: s"),
    ({"sampling": "sampled"}, "sampling_defaults", r"ours: greedy; theirs: sampled"),
    ({"stop": "ignored"}, "stop", r"stop is honoured by ours; ignored by theirs"),
    ({"ignore_eos": "refused"}, "ignore_eos", r"refused by theirs"),
    ({"json_schema": "refused"}, "response_format", r"refused by theirs"),
    ({"offered_tools": "refused"}, "tools", r"refused by theirs"),
    ({"forced_tools": "ignored"}, "tool_choice", r"ignored by theirs"),
    ({"has_cached_tokens": False}, "cached_tokens", r"theirs tells no cached tokens"),
    ({"has_stream_usage": False}, "usage", r"theirs tells no usage in streams"),
]


@pytest.mark.parametrize(("more", "what", "sentence"), TELL)
def test_what_leaves_times_comparable_is_told(more: dict[str, Any], what: str, sentence: str) -> None:
    (told,) = found(**more)
    assert (told.what, told.forbids_ranking) == (what, False)
    assert re.search(sentence, told.sentence), told


def test_short_answers_that_part_at_a_near_tie_are_told() -> None:
    ours = replace(SAME, short=(Greedy("once", "stop", STEPS), SAME.short[1]))
    theirs = replace(SAME, exact=("13", "yes"), short=(TIED, SAME.short[1]))
    (told,) = differences({"ours": ours, "theirs": theirs})
    assert told == Difference(
        "exact_answers",
        "1 of 2 short answers differ where two tokens are nearly equal (ours 2 right, theirs 2 right).",
        False,
    )


def test_a_near_tie_needs_both_to_hold_it() -> None:
    once = Greedy("once up", "length", STEPS)
    assert parting(once, once) is None
    assert parting(once, TIED) is not None
    assert [found and found.is_near_tie for found in (parting(once, TIED), parting(once, SURE))] == [True, False]
    assert parting(once, Greedy("onto up")) == parting(Greedy("once up"), Greedy("onto up"))


@pytest.mark.parametrize(
    ("text", "is_it"),
    [("once up", True), ("onto the", True), ("onwards", False), ("once", False), ("once up on", False), ("", False)],
)
def test_a_text_is_nearly_an_answer_where_it_parts_at_a_near_tie(text: str, is_it: bool) -> None:
    assert is_nearly(Greedy("once up", "length", STEPS), text) == is_it


def test_answers_of_no_text_prove_nothing() -> None:
    silent = replace(SAME, greedy=(Greedy("", "length"), Greedy("", "length")))
    (told,) = differences({"a": silent, "b": silent})
    assert told.forbids_ranking
    assert "No greedy answer has any text" in told.sentence


def test_several_candidates_are_named_by_what_they_do() -> None:
    other = replace(SAME, prompt_tokens=(29, 60, 40, 50))
    told = differences({"a": SAME, "b": other, "c": SAME, "d": other})
    assert told == [
        Difference(
            "prompt_tokens",
            "Prompt tokens of probe 1: a and c count 31; b and d count 29: another template or tokenizer.",
            True,
        )
    ]


def test_those_that_forbid_come_first() -> None:
    told = found(has_cached_tokens=False, prompt_tokens=(1, 60, 40, 50), sampling="sampled", max_tokens="ignored")
    assert [one.forbids_ranking for one in told] == [True, True, False, False]


def test_probes_are_plain_values_for_a_document() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SAME))["greedy"][0]["text"] == "once up"
