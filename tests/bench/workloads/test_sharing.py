"""Requests share what their workload says, siblings too, and salted ones nothing."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest

from localllm.bench.workloads.parse import parse_workload
from tests.bench.workloads.asking import CHATS, SHIPPED, asks_of, before_last, common, flat, taken

# Salts differ at their first character; before them stand at most a role, or the first tool's name.
MOST_SHARED_CHARS_WITH_SALT = 100


@pytest.mark.parametrize("name", SHIPPED)
def test_other_seeds_share_nothing_long(name: str) -> None:
    for first, second in zip(asks_of(name, 2, 1), asks_of(name, 2, 2), strict=True):
        assert len(common(flat(first), flat(second))) < 130
        assert flat(first)[-60:] != flat(second)[-60:]


@pytest.mark.parametrize(
    "spec",
    [
        *SHIPPED,
        "chat:turns=9,system=300,user=20",
        "rag:documents=2,document=300,question=60",
        "agent:steps=0,tools=3",
        "agent:steps=6,branches=1,system=200,result=200",
        "code-edit:file=400,edits=5",
        "fim:cursors=9,before=400",
        "batch:instruction=400,labels=10,item=60",
        "json:text=200",
        "chat:turns=1,system=0",
    ],
)
def test_the_stated_shares_of_repeated_text_are_those_found(spec: str) -> None:
    workload = parse_workload(spec)
    # Enough sessions that the first of its kind does not count much.
    asks = asks_of(spec, max(24, min(160, 240 // workload.facts["requests_per_session"])))
    texts = [flat(ask) for ask in asks]
    total = sum(len(text.split()) for text in texts)
    repeated = 0
    for at, text in enumerate(texts):
        # The longest of those before it; forty back, every shared part was asked about again.
        begun = max((common(text, other) for other in texts[max(0, at - 40) : at]), key=len, default="")
        repeated += len(begun.split())
    # Texts may begin with the same few words by chance.
    by_chance = 5 * len(asks) / total
    assert repeated / total == pytest.approx(workload.facts["repeated_share"], abs=0.05 + by_chance)
    standing = sum(len(before_last(ask).split()) for ask in asks)
    if workload.facts["shared"]:
        assert standing / total == pytest.approx(workload.facts["before_last_share"], abs=0.05)


def test_documented_sharing_is_byte_for_byte() -> None:
    n = 12
    assert len({before_last(ask) for ask in asks_of("rag", n)}) == 4
    assert len({before_last(ask) for ask in asks_of("rag:documents=7", n)}) == 7
    assert len({before_last(ask) for ask in asks_of("batch", n)}) == 1
    assert len({before_last(ask) for ask in asks_of("json", n)}) == 1
    assert len({before_last(ask) for ask in asks_of("code-edit", n)}) == n
    assert len({before_last(ask) for ask in asks_of("agent:steps=0", n)}) == 1
    # Each session: one more prefix a step, and one that all branches have.
    assert len({before_last(ask) for ask in asks_of("agent:steps=3,branches=4", n)}) == 1 + n * 3
    for name in ("rag", "batch", "json", "code-edit", "chat", "agent"):
        systems = {ask.messages[0]["content"] for ask in asks_of(name, n)}
        assert len(systems) == {"rag": 4, "code-edit": n}.get(name, 1)
    assert len({json.dumps(ask.tools) for ask in asks_of("agent", n)}) == 1


@pytest.mark.parametrize("name", ["chat", "agent", "fim"])
def test_later_asks_of_a_growing_session_begin_with_the_earlier_ones(name: str) -> None:
    for session in taken(f"{name}:branches=1" if name == "agent" else name, 6):
        for before, after in pairwise(session):
            if before.prompt is not None:
                assert after.prompt is not None
                assert after.prompt.startswith(before.prompt)
            else:
                assert after.messages[: len(before.messages)] == before.messages
                assert after.messages[len(before.messages)]["role"] == "assistant"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sibling_shares_what_stands_before_the_last_message_and_no_more(name: str) -> None:
    for ask in asks_of(name, 6):
        sibling = ask.sibling()
        assert flat(sibling).startswith(before_last(ask))
        assert before_last(sibling) == before_last(ask)
        n_more = len(common(flat(sibling), flat(ask))) - len(before_last(ask))
        # The role may follow, and in a prompt nothing but the end of the text.
        assert n_more <= (len("<user> ") + 2 if ask.messages else 0)
        assert sibling.max_tokens == 1


@pytest.mark.parametrize("name", CHATS)
def test_asks_with_one_prefix_have_one_sibling(name: str) -> None:
    asks = asks_of(name, 6)
    assert len({flat(ask.sibling()) for ask in asks}) == len({before_last(ask) for ask in asks})


@pytest.mark.parametrize("name", SHIPPED)
def test_salts_break_every_shared_prefix_from_the_beginning(name: str) -> None:
    salted = [ask.salted(f"{chr(97 + at)} salt") for at, ask in enumerate(asks_of(name, 3))]
    assert len(salted) <= 26
    for first, second in combinations(salted, 2):
        assert len(common(flat(first), flat(second))) < MOST_SHARED_CHARS_WITH_SALT
        for before, after in zip(first.messages[:1], second.messages[:1], strict=True):
            assert common(before["content"], after["content"]) == "["
    one = [ask.salted("one") for ask in asks_of(name, 6)]
    assert len({before_last(ask) for ask in one}) == len({before_last(ask) for ask in asks_of(name, 6)})
