"""Chunks as bytes: always JSON that clients parse, whatever stands in a text or a name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localllm.runtime import events
from localllm.server.answers import Costs, Identity, fingerprint
from localllm.server.sse import ChatChunks, Chunks, CompletionChunks, comment

texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)


def parsed(data: bytes) -> list[Any]:
    """Return the data of events, taken apart as a client does."""
    return [json.loads(event.removeprefix(b"data: ")) for event in data.split(b"\n\n") if event]


@example("a\u2028b\u2029c\x85d\x0be\x1cf", "\x85", False)
@given(texts, texts, st.booleans())
def test_any_text_and_any_name_make_one_event(text: str, name: str, has_usage: bool) -> None:
    for kind, read in ((ChatChunks, lambda c: c["delta"]["content"]), (CompletionChunks, lambda c: c["text"])):
        chunks: Chunks = kind(Identity("id", name, "fp"), 2, has_usage=has_usage, is_counting=False)
        data = chunks.token(events.Token(1, text, (1,)))
        assert data.count(b"\n") == 2
        assert len(data.decode().splitlines()) == 2  # by Unicode's line ends too, as httpx cuts
        (chunk,) = parsed(data)
        assert read(chunk["choices"][0]) == text
        assert chunk["choices"][0]["index"] == 1
        assert chunk["model"] == name
        assert ("usage" in chunk) == has_usage


def test_every_choice_begins_with_its_role() -> None:
    chunks = ChatChunks(Identity("id", "m", "fp"), 3, has_usage=False, is_counting=False)
    first = parsed(chunks.first())
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in first)


@pytest.mark.parametrize("is_detailed", [False, True])
@pytest.mark.parametrize("has_usage", [False, True])
def test_costs_are_told_only_where_asked_for(has_usage: bool, is_detailed: bool) -> None:
    chunks = CompletionChunks(Identity("id", "m", "fp"), 1, has_usage=has_usage, is_counting=False)
    usage = events.Usage(5, 3, {"device": 2}, 1, 1, {"prefill": 2.0, "decode": 0.0, "queue": 1.5})
    told = parsed(chunks.costs(Costs(usage, 10, 20, 0.25, is_detailed)))
    if not has_usage and not is_detailed:
        assert told == []
        return
    (chunk,) = told
    assert chunk["choices"] == []
    assert ("usage" in chunk) == has_usage
    assert chunk["timings"]["prompt_per_second"] == 1500.0
    assert chunk["timings"]["predicted_per_second"] == 0.0
    assert (chunk["timings"]["max_tokens"], chunk["timings"]["max_tokens_asked"]) == (10, 20)
    assert ("timeline_ms" in chunk["timings"]) == is_detailed


def test_comments_are_no_data() -> None:
    assert comment("prefill 1/2") == b": prefill 1/2\n\n"


def test_the_fingerprint_is_equal_while_file_settings_and_version_are() -> None:
    model = {"sha256": "a", "settings": {"n_ctx": 1, "kv": "f16"}}
    assert fingerprint(model, "1") == fingerprint({"settings": {"kv": "f16", "n_ctx": 1}, "sha256": "a"}, "1")
    others = [{**model, "sha256": "b"}, {**model, "settings": {"n_ctx": 2, "kv": "f16"}}]
    assert len({fingerprint(model, "1"), fingerprint(model, "2"), *(fingerprint(o, "1") for o in others)}) == 4
