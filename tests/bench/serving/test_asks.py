"""Which asks are sent, in which order, under which salts, and what is sent before."""

from __future__ import annotations

from itertools import islice

import pytest

from localllm.bench.serving.asks import (
    by_session,
    each_its_own,
    first_of_each_kind,
    interleaved,
    n_whole_in,
    one_for_all,
    prefixes,
)
from localllm.bench.workloads.ask import Ask
from localllm.bench.workloads.parse import parse_workload
from tests.bench.serving.asked import conversation, turn


def last(ask: Ask) -> str:
    return str(ask.messages[-1]["content"])


def test_sessions_of_a_window_take_turns_and_keep_their_order() -> None:
    sessions = [conversation(name, 2) for name in "abc"]
    order = [last(ask) for _, ask in interleaved(sessions, 2)]
    assert order == ["a asks 0", "b asks 0", "a asks 1", "b asks 1", "c asks 0", "c asks 1"]


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_no_turn_is_lost_and_none_comes_before_the_one_before_it(window: int) -> None:
    sessions = [conversation(str(n), 1 + n % 4) for n in range(11)]
    seen: dict[int, int] = {}
    for number, ask in interleaved(sessions, window):
        place = sessions[number].index(ask)
        assert place == seen.get(number, -1) + 1
        seen[number] = place
    assert [len(session) - 1 for session in sessions] == [seen[n] for n in range(11)]


def test_an_ended_session_is_replaced_at_once() -> None:
    sessions = [conversation("a", 1), conversation("b", 3), conversation("c", 2)]
    numbers = [number for number, _ in interleaved(sessions, 2)]
    assert numbers == [0, 1, 2, 1, 2, 1]


def test_sessions_without_asks_are_passed_over() -> None:
    assert [last(ask) for _, ask in interleaved([(), conversation("a", 1), ()], 2)] == ["a asks 0"]


def test_as_many_clients_as_the_window_have_a_session_each() -> None:
    first = list(islice(interleaved((conversation(str(n), 6) for n in range(100)), 8), 32))
    assert [len(session) for session in by_session(first)] == [4] * 8


def test_cold_salts_are_all_different_and_equally_long() -> None:
    salted = each_its_own()
    texts = [str(salted(turn("x")).messages[0]["content"]) for _ in range(50)]
    assert len(set(texts)) == 50
    assert len({len(text) for text in texts}) == 1


def test_one_salt_is_the_same_in_a_run_and_another_in_the_next() -> None:
    first, second = one_for_all(), one_for_all()
    assert first(turn("x")) == first(turn("x"))
    assert first(turn("x")) != second(turn("x"))
    assert len(first(turn("x")).messages[0]["content"]) == len(second(turn("x")).messages[0]["content"])


def test_of_nested_beginnings_the_longest_is_sent_once() -> None:
    asks = [*conversation("a", 3), *conversation("b", 2), *conversation("a", 3)]
    sent = prefixes(asks)
    beginnings = [[message["content"] for message in ask.messages[:-1]] for ask in sent]
    assert beginnings == [
        ["Be brief.", "a asks 0", "a hears 0", "a asks 1", "a hears 1"],
        ["Be brief.", "b asks 0", "b hears 0"],
    ]
    assert {ask.max_tokens for ask in sent} == {1}
    assert n_whole_in(asks, sent) == 5  # all but each conversation's last


def test_what_begins_alike_but_goes_on_otherwise_is_sent_both_times() -> None:
    assert len(prefixes([turn("same", "one", "end"), turn("same", "other", "end")])) == 2


def test_tools_are_part_of_a_beginning() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with_tools, without = turn("x", "y", "z", tools=(tool,)), turn("x", "y", "z")
    assert len(prefixes([with_tools, without])) == 2


def test_asks_that_share_nothing_need_nothing_before() -> None:
    alone = Ask("batch", 4, messages=({"role": "user", "content": "x"},))
    assert prefixes([alone, alone]) == []


def test_beginnings_of_prompts_are_whole_lines() -> None:
    asks = [Ask("fim", 4, prompt=text) for text in ("a\nb\nc", "a\nb\nd", "a\nx", "a\nbb\nc")]
    assert [ask.prompt for ask in prefixes(asks)] == ["a\nb\n", "a\nbb\n"]


def test_the_first_of_each_kind_are_found() -> None:
    asks = [Ask(kind, 4, prompt=str(n)) for n, kind in enumerate("aabab")]
    found = first_of_each_kind(asks, 2)
    assert {kind: [ask.prompt for ask in some] for kind, some in found.items()} == {"a": ["0", "1"], "b": ["2", "4"]}


@pytest.mark.parametrize("name", ["chat", "rag", "agent", "code-edit", "json", "story", "fim", "batch"])
def test_beginnings_cover_every_ask_of_a_shipped_workload(name: str) -> None:
    salted = one_for_all()
    asks = [salted(ask) for _, ask in islice(interleaved(parse_workload(name).sessions(3), 4), 24)]
    sent = prefixes(asks)
    assert len(sent) <= len(asks)
    for ask in asks:
        begin = ask.sibling()
        if begin.prompt is not None:
            assert any(str(one.prompt).startswith(begin.prompt) for one in sent)
        elif len(begin.messages) > 1:
            shared = begin.messages[:-1]
            assert any(one.messages[: len(shared)] == shared and one.tools == begin.tools for one in sent)
