"""How far two answers are apart: places, lists that differ, gaps."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.bench.goldens.checking import Move, compare


def entry(ids: list[int], *places: dict[int, float], **more: Any) -> dict[str, Any]:
    logprobs = [[[token, value] for token, value in place.items()] for place in places]
    base = {"name": "p", "refused": "", "prompt_ids": [1, 2, 3], "ids": ids, "answer": str(ids), "logprobs": logprobs}
    return base | more


OLD = entry([10, 11], {10: -0.1, 12: -2.5, 13: -4.0}, {11: -0.5, 12: -0.9, 14: -5.0})


def test_places_are_compared_up_to_the_first_token_that_differs() -> None:
    new = entry([10, 12, 99], {10: -0.2, 12: -2.5, 13: -4.0}, {12: -0.6, 11: -0.8, 14: -5.0}, {99: -0.1, 5: -9.0})
    found = compare(OLD, new)
    assert found.moves == (Move.TEXT,)
    assert found.text_at == 1
    assert found.gap_nats == pytest.approx(0.4)
    assert found.drift_nats == pytest.approx(0.3)


def test_a_near_tie_is_said_to_be_one_where_logprobs_held() -> None:
    tie = entry([10, 14], {10: -0.1, 12: -2.5, 13: -4.0}, {14: -0.6, 11: -0.8, 12: -4.0})
    near = compare(entry([10, 11], {10: -0.1, 12: -2.5, 13: -4.0}, {11: -0.6, 14: -0.9, 12: -4.0}), tie)
    assert near.sentence == (
        "text moved at token 1 of 2, where the two likeliest were 0.3 nats apart (a near tie, which drift decides); "
        "logprobs within 0.3 nats"
    )


def test_a_token_that_left_the_list_is_at_most_as_likely_as_its_last() -> None:
    new = entry([10, 11], {10: -0.1, 12: -2.5, 7: -3.9}, {11: -0.5, 12: -0.9, 14: -5.0})
    assert compare(OLD, new).drift_nats == pytest.approx(0.1)  # 13 was -4.0 and is below -3.9; 7 was below -4.0
    far = entry([10, 11], {10: -0.1, 12: -6.0, 8: -6.5}, {11: -0.5, 12: -0.9, 14: -5.0})
    assert compare(OLD, far).drift_nats == pytest.approx(3.5)


def test_an_answer_that_ends_earlier_moved_there() -> None:
    new = entry([10], {10: -0.1, 12: -2.5, 13: -4.0})
    found = compare(OLD, new)
    assert (found.moves, found.text_at, found.drift_nats) == ((Move.TEXT,), 1, 0.0)
    assert compare(new, OLD).text_at == 1


def test_equal_tokens_that_read_otherwise_moved_too() -> None:
    found = compare(OLD, OLD | {"answer": "x"})
    assert (found.moves, found.text_at) == ((Move.TEXT,), None)
    assert found.sentence == "the same tokens, written as another text; logprobs within 0 nats"


def test_both_can_move_and_the_sentence_says_both() -> None:
    new = entry([12], {12: -0.1, 10: -3.1, 13: -4.0})
    found = compare(OLD, new)
    assert found.moves == (Move.TEXT, Move.LOGPROBS)
    assert found.sentence == (
        "text moved at token 0 of 2, where the two likeliest were 2.4 nats apart; "
        "logprobs moved by up to 3 nats (drift is up to 0.8)"
    )


def test_other_prompt_tokens_say_nothing_of_drift() -> None:
    found = compare(OLD, OLD | {"prompt_ids": [1, 2, 4], "answer": OLD["answer"]})
    assert (found.moves, found.prompt_at, found.drift_nats) == ((Move.PROMPT,), 2, None)
    assert found.sentence == "prompt tokens moved at 2 of 3 (template or tokenizer)"
