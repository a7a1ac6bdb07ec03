"""Texts to tokens and back, and conversations to prompts, in the names of two servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm.errors import TimedOut, WorkerDied
from localllm.server.state import ServerSettings
from tests.fake_engine import ASSISTANT, BOS, N_VOCAB, USER, fake_service
from tests.server.fakes import FakeSupervisor, FakeWorker, Running, fake_supervisor, serving, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as server:
        yield server


def test_content_is_tokenised_as_llama_cpp_does(running: Running) -> None:
    reply = running.post("/tokenize", {"content": "hi<|user|>"})
    assert reply.json == {"tokens": [104, 105, USER], "count": 3, "max_model_len": 4096, "token_strs": None}
    assert running.post("/tokenize", {"content": "hi", "add_special": True}).json["tokens"] == [BOS, 104, 105]
    plain = running.post("/tokenize", {"content": "<s>", "parse_special": False}).json["tokens"]
    assert plain == list(b"<s>")


def test_prompt_is_tokenised_as_vllm_does(running: Running) -> None:
    told = running.post("/tokenize", {"model": "fake", "prompt": "hi", "return_token_strs": True}).json
    assert told == {"tokens": [BOS, 104, 105], "count": 3, "max_model_len": 4096, "token_strs": ["<s>", "h", "i"]}
    assert running.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json["tokens"] == [104, 105]


def test_pieces_are_texts_or_bytes_where_these_are_no_characters(running: Running) -> None:
    told = running.post("/tokenize", {"content": "hé", "with_pieces": True}).json
    assert told["tokens"] == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert told["count"] == 3


@pytest.mark.parametrize("text", ["", " ", "plain", "é🦊\u2028", "\x00\x1f", "</s><|assistant|>", "x" * 100_000])
def test_a_text_comes_back(running: Running, text: str) -> None:
    tokens = running.post("/tokenize", {"content": text}).json["tokens"]
    told = running.post("/detokenize", {"tokens": tokens}).json
    assert told == {"content": text, "prompt": text}


def test_half_a_character_comes_back_as_the_sign_for_it(running: Running) -> None:
    assert running.post("/detokenize", {"tokens": [104, 195]}).json["content"] == "h\ufffd"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": "a", "prompt": "a"}, "content"),
        ({"content": None, "prompt": None}, "content"),
        ({"content": 1}, "content"),
        ({"prompt": ["a"]}, "prompt"),
        ({"content": "a", "add_special": True, "add_special_tokens": False}, "add_special"),
        ({"content": "a", "with_pieces": "yes"}, "with_pieces"),
        ({"content": "a", "model": 3}, "model"),
    ],
)
def test_what_cannot_be_tokenised_is_a_400_that_names_the_field(running: Running, body: Any, param: str) -> None:
    reply = running.post("/tokenize", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_texts_and_lists_are_bounded(running: Running) -> None:
    long = "x" * 200_001
    assert running.post("/tokenize", {"content": long}).json["count"] == 200_001
    for field, flag in (("content", "with_pieces"), ("prompt", "return_token_strs")):
        reply = running.post("/tokenize", {field: long, flag: True})
        assert (reply.status, reply.error["param"], reply.error["limit"]) == (400, field, 200_000)
    assert running.post("/tokenize", {"content": "x" * 2_000_001}).error["param"] == "content"
    assert running.post("/detokenize", {"tokens": [97] * 1_000_001}).error["param"] == "tokens"


@pytest.mark.parametrize("tokens", [None, "a", [-1], [N_VOCAB], [2**64 - 1], ["1"], [1.0], [[1]], [True], {}])
def test_what_is_no_token_is_a_400_that_names_tokens(running: Running, tokens: Any) -> None:
    reply = running.post("/detokenize", {"tokens": tokens})
    assert reply.status == 400
    assert reply.error["param"].startswith("tokens")


def test_a_conversation_becomes_the_prompt_that_the_model_sees(running: Running) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "</s>"},
    ]
    told = running.post("/apply-template", {"messages": messages}).json
    assert told["prompt"] == "<s><|user|>s<|user|>hi<|assistant|>yo</s><|user|></s><|assistant|>"
    assert told["n_tokens"] == len([BOS, USER, "s", USER, *"hi", ASSISTANT, *"yo", 257, USER, *"</s>", ASSISTANT])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ x }}"}, "chat_template"),
    ],
)
def test_what_is_no_conversation_is_a_400_that_names_the_place(running: Running, body: Any, param: str) -> None:
    reply = running.post("/apply-template", body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_model_without_a_template_says_so() -> None:
    with serving(FakeSupervisor(FakeWorker("fake", fake_service(template=None)))) as running:
        reply = running.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})
        assert (reply.status, reply.error["code"]) == (400, "template_error")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_models_fields_and_failures_are_as_everywhere(running: Running, path: str) -> None:
    body = {"content": "a", "tokens": [97], "messages": [{"role": "user", "content": "a"}]}
    body = {name: body[name] for name in {"/tokenize": ["content"], "/detokenize": ["tokens"]}.get(path, ["messages"])}
    assert running.post(path, {**body, "model": "nope"}).error["code"] == "model_not_found"
    reply = running.post(path, {**body, "user": "u", "odd": 1, "od\u00e9\r\n": 1})
    assert (reply.status, reply.headers["x-localllm-ignored-fields"]) == (200, "odd, ?")
    verb = {"/tokenize": "tokenize", "/detokenize": "detokenize"}.get(path, "template")
    for error, status in ((WorkerDied("died"), 503), (TimedOut("late"), 504)):
        running.worker.fails[verb] = error
        try:
            assert running.post(path, body).status == status
        finally:
            del running.worker.fails[verb]
    with serving(fake_supervisor(), ServerSettings(strict=True)) as strict:
        assert strict.post(path, {**body, "odd": 1}).error["param"] == "odd"


def test_counts_and_codes_are_logged_but_no_text(running: Running) -> None:
    reply = running.post("/tokenize", {"content": "SECRET"})
    wait_until(lambda: reply.headers["x-request-id"] in running.log.getvalue())
    assert "SECRET" not in running.log.getvalue()
