from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from localllm.bench.client.calls import End, Outcome
from proof.history import History, Texts, log_lines

ANSWER = Outcome("a", 0, End.ANSWER, True, 200, 0.0, 0.0, 1.0, request_id="a", text="once upon")


def history(*outcomes: Outcome, sent: tuple[str, ...] = ("a",)) -> History:
    kept = History()
    for name in sent:
        kept.began(name)
    for outcome in outcomes:
        kept.keep(outcome)
    return kept


def line(request_id: str = "a", code: int = 200) -> dict[str, Any]:
    return {"event": "request", "request_id": request_id, "code": code}


def test_one_end_of_which_all_tell_is_right() -> None:
    assert history(ANSWER).check([line()]) == []


@pytest.mark.parametrize("end", [End.LOST, End.MALFORMED, End.TIMED_OUT, End.UNREACHABLE])
def test_an_end_that_is_no_proper_one_is_told(end: End) -> None:
    (found,) = history(replace(ANSWER, end=end, fault="cut")).check([line()])
    assert "cut" in found


def test_a_request_without_an_end_is_told() -> None:
    assert history().check([line()]) == ["a: no end"]


@pytest.mark.parametrize(
    ("outcomes", "log"),
    [
        ((ANSWER, ANSWER), [line()]),
        ((ANSWER,), []),
        ((ANSWER,), [line(), line()]),
        ((ANSWER,), [line(code=503)]),
        ((replace(ANSWER, request_id="b"),), [line()]),
        ((replace(ANSWER, n_sends=2),), [line()]),
    ],
)
def test_witnesses_that_disagree_are_told(outcomes: tuple[Outcome, ...], log: list[dict[str, Any]]) -> None:
    assert len(history(*outcomes).check(log)) == 1


def test_a_cancelled_request_may_never_have_arrived() -> None:
    cancelled = replace(ANSWER, end=End.CANCELLED, status=None, request_id=None)
    assert history(cancelled).check([]) == []
    assert history(cancelled).check([line(code=499)]) == []
    assert len(history(cancelled).check([line(), line()])) == 1


def test_the_log_is_read_past_what_is_no_line_of_a_request() -> None:
    text = f"listening\n{json.dumps(line())}\n{{broken\n{json.dumps({'event': 'note', 'text': 'x'})}\n"
    assert list(log_lines(text)) == [line()]


def test_texts_of_one_prompt_must_agree() -> None:
    texts = Texts()
    texts.see("p", ANSWER)
    texts.see("p", replace(ANSWER, text="once"))
    texts.see("p", replace(ANSWER, text="once upon a time"))
    texts.see("q", replace(ANSWER, text="never"))
    assert texts.mixed_up == []
    texts.see("p", replace(ANSWER, label="z", text="once upon a table"))
    assert texts.mixed_up == ["z: another text than before"]
