"""A model whose answers are equal to the last bit says so in each of them, and no other model does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from localllm.server.answer_schemas import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from tests.fake_engine import SPEC, FakeEngine
from tests.server.fakes import Running, fake_supervisor, serving

EXACT = replace(SPEC, cut_tokens=64, mixes_prefill_and_decode=False)
TOLD = {"deterministic": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
}
EVERY = pytest.mark.parametrize("path", ASKED)
WHOLE = {"/v1/chat/completions": ChatAnswer, "/v1/completions": CompletionAnswer}
CHUNK = {"/v1/chat/completions": ChatChunk, "/v1/completions": CompletionChunk}


@pytest.fixture
def exact() -> Iterator[Running]:
    """A server over a model that was loaded with --deterministic."""
    with serving(fake_supervisor(FakeEngine(EXACT))) as running:
        yield running


@EVERY
def test_a_whole_answer_tells(exact: Running, path: str) -> None:
    body = exact.post(path, ASKED[path]).json
    assert body["localllm"] == TOLD
    assert msgspec.convert(body, WHOLE[path]).localllm.deterministic is True


@EVERY
def test_every_chunk_tells(exact: Running, path: str) -> None:
    *chunks, end = exact.post(path, {**ASKED[path], "stream": True}).events
    assert end == "[DONE]"
    assert [chunk["localllm"] for chunk in chunks] == [TOLD] * len(chunks)
    assert all(msgspec.convert(chunk, CHUNK[path]).localllm.deterministic for chunk in chunks)


@EVERY
def test_other_models_do_not_tell(running: Running, path: str) -> None:
    assert "localllm" not in running.post(path, ASKED[path]).json
    assert not any("localllm" in chunk for chunk in running.post(path, {**ASKED[path], "stream": True}).events[:-1])


def test_embeddings_are_as_they_are_elsewhere(exact: Running, running: Running) -> None:
    asked = {"input": ["hello", "there"]}
    assert exact.post("/v1/embeddings", asked).json["data"] == running.post("/v1/embeddings", asked).json["data"]
