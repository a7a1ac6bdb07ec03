"""Completions through the official client: prompts of every kind, both forms, the older logprobs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from localllm.runtime.types import CompletionRequest
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_engine import SPECIALS, FakeEngine
from tests.server.fakes import Running, fake_supervisor, serving


def complete(running: Running, prompt: Any = "hello", **body: Any) -> Any:
    return running.post("/v1/completions", {"prompt": prompt, "max_tokens": 6, **body})


def test_the_client_sends_every_parameter_it_has(client: openai.OpenAI, running: Running) -> None:
    answer = client.completions.create(
        model="fake",
        prompt="hello",
        best_of=2,
        echo=False,
        frequency_penalty=0.1,
        logit_bias={"65": 1},
        logprobs=2,
        max_tokens=5,
        n=2,
        presence_penalty=0.1,
        seed=1,
        stop=["zz"],
        temperature=0.0,
        top_p=1.0,
        user="me",
    )
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    request = running.worker.requests[-1]
    assert isinstance(request, CompletionRequest)
    assert (request.options.n, request.options.logprobs, request.suffix) == (2, 2, None)


def test_streamed_texts_are_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="hello", max_tokens=20)
    chunks = list(client.completions.create(model="fake", prompt="hello", max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_a_prompt_is_text_or_its_tokens(running: Running) -> None:
    text = complete(running, "abc").json["choices"][0]["text"]
    ids = [256, *b"abc"]
    assert complete(running, ids).json["choices"][0]["text"] == text
    assert complete(running, [ids]).json["choices"][0]["text"] == text
    assert complete(running, ["abc"]).json["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_choices_counted_through(running: Running, stream: bool) -> None:
    alone = [complete(running, prompt).json["choices"][0]["text"] for prompt in ("abc", "xyz", "pqr")]
    reply = complete(
        running, ["abc", "xyz", "pqr"], n=2, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    assert reply.status == 200
    texts = [""] * 6
    reasons = {}
    *chunks, last = reply.events if stream else (reply.json, None)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [text for text in alone for _ in range(2)]
    assert set(reasons.values()) == {"length"}
    assert chunks[-1]["usage"]["completion_tokens"] == 36
    assert chunks[-1]["usage"]["prompt_tokens"] == 12
    assert last in ("[DONE]", None)


def test_one_bad_prompt_of_several_refuses_all(running: Running) -> None:
    for stream in (False, True):
        reply = complete(running, ["abc", "x" * 5000, "def"], stream=stream)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert complete(running).status == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], [1, [2]], None, 5, {}, [1.5], [True], [99999], ["a"] * 65])
def test_prompts_that_are_none_are_refused(running: Running, prompt: Any) -> None:
    reply = complete(running, prompt)
    if prompt in ("", [[]]) and reply.status == 200:
        assert reply.json["usage"]["prompt_tokens"] == 1  # the token that begins a text
        return
    assert reply.status == 400
    assert (reply.error["param"] or "prompt").startswith("prompt")


def test_echo_puts_the_prompt_before_the_answer(running: Running) -> None:
    answer = complete(running, "abc").json["choices"][0]["text"]
    assert complete(running, "abc", echo=True).json["choices"][0]["text"] == "abc" + answer
    assert complete(running, list(b"abc"), echo=True).json["choices"][0]["text"].startswith("abc")
    chunks = complete(running, "abc", echo=True, stream=True, n=2).events[:-1]
    for index in (0, 1):
        texts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(texts) == "abc" + answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"grammar": "x"}, "grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n_predict": 5}, "n_predict"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_it(running: Running, fields: dict[str, Any], param: str) -> None:
    reply = complete(running, **fields)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_a_suffix_is_filled_in_before_where_the_model_can(running: Running) -> None:
    reply = complete(running, "def f(", suffix="return 1")
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens"] == 1 + len("def f(") + len("return 1") + 3
    request = running.worker.requests[-1]
    assert isinstance(request, CompletionRequest)
    assert request.suffix == "return 1"
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(tuple(SPECIALS.values()), bos="<s>", eos="</s>", add_bos=True)
    with serving(fake_supervisor(engine)) as other:
        for stream in (False, True):
            reply = complete(other, "def f(", suffix="return 1", stream=stream)
            assert (reply.status, reply.error["param"]) == (400, "suffix")


@pytest.mark.parametrize("n_best", [0, 1, 5])
def test_completion_logprobs_have_the_older_shape(running: Running, n_best: int) -> None:
    choice = complete(running, logprobs=n_best).json["choices"][0]
    told = choice["logprobs"]
    assert set(told) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == list(range(6))
    assert [len(best) for best in told["top_logprobs"]] == [max(n_best, 1)] * 6
    for token, logprob, best in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert best[token] == logprob <= 0
    assert complete(running).json["choices"][0]["logprobs"] is None


def test_streamed_logprobs_go_on_where_the_last_chunk_ended(running: Running) -> None:
    whole = complete(running, logprobs=1).json["choices"][0]["logprobs"]
    chunks = complete(running, logprobs=1, stream=True).events[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_offsets_count_characters_and_cut_characters_are_spelled() -> None:
    fox = "é🦊".encode()
    script = FakeEngine(script=lambda tokens: fox[(len(tokens) - 6) % 6])
    with serving(fake_supervisor(script)) as running:
        choice = complete(running, "hello", logprobs=0).json["choices"][0]
    assert choice["text"] == "é🦊"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1]
    assert choice["logprobs"]["tokens"][0] == "bytes:\\xc3"


def test_specials_in_a_prompt_are_parsed(running: Running) -> None:
    assert complete(running, "<|user|>a").json["usage"]["prompt_tokens"] == 3
