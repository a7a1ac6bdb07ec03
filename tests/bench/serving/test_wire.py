"""How an ask is sent, and when an answer is valid."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from localllm.bench.client.calls import Target
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.spec import Api
from localllm.bench.serving.wire import call_of, cannot_send, is_valid
from localllm.bench.workloads.ask import Ask

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
HELLO = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})


class Part(msgspec.Struct, forbid_unknown_fields=True):
    n: int


class Found(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parts: list[Part]


def endpoint(api: Api = "openai-chat") -> Endpoint:
    return Endpoint(Target("127.0.0.1", 1), "small", api)


def sent(ask: Ask, api: Api = "openai-chat", *, fills: bool = False) -> tuple[str, dict[str, Any]]:
    call = call_of(ask, endpoint(api), fills_length=fills, label="7")
    assert call.label == "7"
    assert call.body is not None
    return call.path, json.loads(call.body)


def test_a_chat_is_streamed_greedily_with_usage() -> None:
    path, body = sent(Ask("chat", 16, messages=HELLO))
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "small",
        "messages": list(HELLO),
        "max_tokens": 16,
        "temperature": 0,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_only_free_text_is_filled() -> None:
    assert sent(Ask("chat", 16, messages=HELLO), fills=True)[1]["ignore_eos"] is True
    assert "ignore_eos" not in sent(Ask("json", 16, messages=HELLO, is_free=False), fills=True)[1]
    assert "ignore_eos" not in sent(Ask("chat", 16, messages=HELLO))[1]


def test_a_schema_is_sent_without_references() -> None:
    _, body = sent(Ask("json", 16, messages=HELLO, answer_type=Found, is_free=False))
    form = body["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["name"] == "Found"
    assert form["json_schema"]["strict"] is True
    schema = form["json_schema"]["schema"]
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name", "parts"]
    assert schema["properties"]["parts"]["items"]["required"] == ["n"]
    assert "$defs" not in schema


def test_text_that_is_to_be_judged_is_kept() -> None:
    assert call_of(Ask("json", 1, messages=HELLO, answer_type=Found), endpoint(), fills_length=False).keep_text
    assert not call_of(Ask("chat", 1, messages=HELLO), endpoint(), fills_length=False).keep_text


@pytest.mark.parametrize(
    ("choice", "spelt"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("look_up", {"type": "function", "function": {"name": "look_up"}}),
    ],
)
def test_tools_and_which_must_be_called(choice: str, spelt: object) -> None:
    _, body = sent(Ask("agent", 16, messages=HELLO, tools=(TOOL,), tool_choice=choice))
    assert body["tools"] == [TOOL]
    assert body["tool_choice"] == spelt
    assert "tool_choice" not in sent(Ask("agent", 16, messages=HELLO, tools=(TOOL,)))[1]


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
def test_a_text_to_complete_goes_to_completions_whatever_the_api(api: Api) -> None:
    path, body = sent(Ask("fim", 16, prompt="def f(", suffix="return x"), api)
    assert path == "/v1/completions"
    assert (body["prompt"], body["suffix"]) == ("def f(", "return x")
    assert "messages" not in body


def test_a_chat_is_written_out_for_completions() -> None:
    path, body = sent(Ask("chat", 16, messages=HELLO), "openai-completions")
    assert path == "/v1/completions"
    assert body["prompt"] == "System: Be brief.\n\nUser: Hello\n\nAssistant:"
    assert "suffix" not in body


def test_a_recorded_request_cannot_change_how_it_is_measured() -> None:
    extra = {"stream": False, "temperature": 2, "top_k": 5, "model": "other"}
    _, body = sent(Ask("replay", 16, messages=HELLO, extra=extra))
    assert (body["stream"], body["temperature"], body["top_k"], body["model"]) == (True, 0, 5, "small")


@pytest.mark.parametrize(
    ("ask", "api", "words"),
    [
        (Ask("agent", 1, messages=HELLO, tools=(TOOL,)), "openai-completions", "tools"),
        (Ask("json", 1, messages=HELLO, answer_type=Found), "openai-completions", "schema"),
        (Ask("chat", 1, messages=HELLO), "openai-completions", ""),
        (Ask("agent", 1, messages=HELLO, tools=(TOOL,), answer_type=Found), "openai-chat", ""),
    ],
)
def test_what_an_api_has_no_field_for_is_not_sent(ask: Ask, api: Api, words: str) -> None:
    assert words in cannot_send(ask, api)
    assert bool(words) == bool(cannot_send(ask, api))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "a", "parts": [{"n": 1}]}', True),
        ('{"name": "a", "parts": []}\n', True),
        ('{"name": "a", "parts": [], "more": 1}', False),
        ('{"name": "a"}', False),
        ('```json\n{"name": "a", "parts": []}\n```', False),
        ("", False),
        ("\ud800", False),
        ("[" * 100_000, False),
    ],
)
def test_an_answer_is_valid_under_its_schema(text: str, valid: bool) -> None:
    assert is_valid(Ask("json", 1, messages=HELLO, answer_type=Found), text) is valid


def test_free_text_is_neither() -> None:
    assert is_valid(Ask("chat", 1, messages=HELLO), "{}") is None
