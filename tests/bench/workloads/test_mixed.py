"""A mix keeps to its weights at every length and leaves each part as it is alone."""

from __future__ import annotations

from itertools import islice

import pytest

from localllm.bench.workloads.parse import parse_workload
from localllm.errors import UsageError

LONGEST_SESSION = 6


@pytest.mark.parametrize(
    "text", ["mixed:chat=.6,rag=.3,story=.1", "mixed:agent=1,batch=1", "mixed:batch=.9,chat=.1", "mixed:fim=5,json=2"]
)
def test_shares_of_requests_are_kept_at_every_length(text: str) -> None:
    workload = parse_workload(text)
    shares = {name: part["share_of_requests"] for name, part in workload.facts["parts"].items()}
    n_asked = dict.fromkeys(shares, 0)
    for session in islice(workload.sessions(3), 300):
        n_asked[session[0].kind] += len(session)
        total = sum(n_asked.values())
        for name, share in shares.items():
            assert abs(n_asked[name] - share * total) <= LONGEST_SESSION, (name, n_asked)


def test_parts_ask_what_they_ask_alone() -> None:
    sessions = list(islice(parse_workload("mixed:chat=1,json=1").sessions(4), 12))
    for name in ("chat", "json"):
        alone = list(islice(parse_workload(name).sessions(4), 12))
        found = [session for session in sessions if session[0].kind == name]
        assert found
        assert found == alone[: len(found)]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("mixed:story=.1,chat=.6,rag=.3", "mixed:chat=0.6,rag=0.3,story=0.1"),
        ("mixed: chat = 6 , rag=3,story=1.0", "mixed:chat=0.6,rag=0.3,story=0.1"),
        ("mixed:chat=2,rag=1", "mixed:chat=2,rag=1"),
        ("mixed:rag=.1,chat=.2", "mixed:chat=2,rag=1"),
        ("mixed:chat=7", "mixed:chat=1"),
        ("mixed:chat=.001,rag=999999", "mixed:chat=0.001,rag=999999"),
        ("mixed:chat=100.001,rag=100", "mixed:chat=100001,rag=100000"),
    ],
)
def test_weights_are_normalised_in_the_spec(text: str, spec: str) -> None:
    assert parse_workload(text).spec == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixed", ("mixed", "weights")),
        ("mixed:", ("mixed", "weights")),
        ("mixed:chat", ("mixed", "'chat'")),
        ("mixed:chat=0", ("mixed", "chat", "'0'")),
        ("mixed:chat=0.0", ("mixed", "chat", "'0.0'")),
        ("mixed:chat=-1", ("mixed", "chat", "'-1'")),
        ("mixed:chat=nan", ("mixed", "chat", "'nan'")),
        ("mixed:chat=0.0001", ("mixed", "chat", "0.001")),
        ("mixed:chat=1e3", ("mixed", "chat", "'1e3'")),
        ("mixed:chat=1,chat=2", ("mixed", "chat", "twice")),
        ("mixed:mixed=1", ("mixed", "no part")),
        ("mixed:replay=1", ("replay", "no part")),
        ("mixed:chta=1", ("chta", "chat")),
    ],
)
def test_a_mix_that_cannot_be_is_refused_in_a_sentence(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_workload(text)
    for word in words:
        assert word in refusal.value.message
    assert refusal.value.hint
