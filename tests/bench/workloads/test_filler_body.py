"""Bodies of requests: what is known keeps its shape, what is not is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.bench.workloads.filler import Filler
from localllm.bench.workloads.filler_body import BodyFiller


def filled(body: dict[str, Any]) -> dict[str, Any]:
    return BodyFiller(Filler()).body(body)


class Canaries:
    """Hands out words that are nowhere else."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self) -> str:
        letters = "zqxjkvwz"
        n = len(self.words)
        self.words.append("xq" + "".join(letters[(n >> (3 * at)) % 8] for at in range(4)) + "qzx")
        return self.words[-1]

    def found_in(self, text: str) -> list[str]:
        return [word for word in self.words if word[2:] in text.lower()]


def canary_body(new: Canaries) -> dict[str, Any]:
    """A request with a canary in every field that holds text, and in many that nobody knows."""
    schema = {
        "type": "object",
        "title": new(),
        "description": f"a {new()}",
        "properties": {
            new(): {"type": "string", "enum": [new(), new()], "pattern": new(), "default": new(), "format": new()},
            "list": {"type": "array", "items": {"$ref": f"#/$defs/{new()}"}, new(): new()},
            "either": {"anyOf": [{"const": new()}, {"type": "null", "examples": [{new(): new()}]}]},
        },
        "required": [new()],
        "$defs": {new(): {"type": ["string", "null"], "$comment": new()}},
        "patternProperties": {new(): True},
        "x-own": new(),
    }
    call = {"id": new(), "type": "function", "function": {"name": new(), "arguments": json.dumps({new(): new()})}}
    return {
        "model": new(),
        "messages": [
            {"role": "system", "content": f"You are {new()}."},
            {"role": "user", "content": [{"type": "text", "text": new()}, {"type": new(), "text": new()}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"https://{new()}/a?b={new()}"}}]},
            {"role": "user", "name": new(), "content": f'{{"{new()}": "{new()}", "n": 12}}'},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": new(), new(): new()},
            {"role": "tool", "tool_call_id": new(), "content": new()},
            {"role": new(), "content": new(), "thinking": new(), "refusal": new()},
            {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"arguments": {new(): [new()]}}}]},
        ],
        "prompt": new(),
        "suffix": new(),
        "tools": [
            {"type": "function", "function": {"name": new(), "description": new(), "parameters": schema}},
            {"type": new(), "url": new()},
        ],
        "tool_choice": {"type": "function", "function": {"name": new()}},
        "response_format": {"type": "json_schema", "json_schema": {"name": new(), "schema": schema, "strict": True}},
        "stop": [new(), new()],
        "user": new(),
        "metadata": {new(): new()},
        "logit_bias": {new(): 1},
        "grammar": f'root ::= "{new()}"',
        "reasoning_effort": new(),
        "stream_options": {"include_usage": True, new(): new()},
        "chat_template_kwargs": {"enable_thinking": False, new(): new()},
        "temperature": new(),
        "seed": 7,
        "stream": True,
        new(): new(),
        "own": {new(): [{new(): new()}]},
    }


def test_no_canary_of_any_field_is_left() -> None:
    new = Canaries()
    body = filled(canary_body(new))
    assert len(new.words) > 60
    assert new.found_in(json.dumps(body)) == []


def test_the_api_keeps_its_own_words_and_numbers() -> None:
    body = filled(canary_body(Canaries()))
    assert (body["seed"], body["stream"], body["stream_options"]) == (7, True, {"include_usage": True})
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "user", "user", "assistant", "tool", "user", "assistant"]
    assert body["response_format"]["type"] == "json_schema"
    assert body["messages"][4]["content"] is None
    assert set(body) <= set(canary_body(Canaries()))


def test_names_agree_wherever_they_stand() -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/Town"}, "unit": {"type": "string", "enum": ["cold", "warm"]}},
        "required": ["city", "unit"],
        "$defs": {"Town": {"type": "string", "maxLength": 20}},
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    body = filled(
        {
            "messages": [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "12"},
            ],
            "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        }
    )
    told = body["messages"][0]["tool_calls"][0]
    schema = body["tools"][0]["function"]["parameters"]
    name = body["tools"][0]["function"]["name"]
    assert told["function"]["name"] == name == body["tool_choice"]["function"]["name"] == body["messages"][1]["name"]
    assert told["id"] == body["messages"][1]["tool_call_id"]
    assert list(json.loads(told["function"]["arguments"])) == schema["required"][:1] == list(schema["properties"])[:1]
    assert schema["properties"][schema["required"][0]]["$ref"].removeprefix("#/$defs/") in schema["$defs"]
    assert len(set(schema["properties"][schema["required"][1]]["enum"])) == 2


def test_what_was_left_out_is_counted() -> None:
    filler = BodyFiller(Filler())
    filler.body({"model": "m", "user": "u", "max_tokens": 5, "messages": [{"role": "user", "content": "x", "own": 1}]})
    assert filler.n_left_out == 3


@pytest.mark.parametrize("prompt", ["text here", ["one here", "two here"], [11, 12, 13], [[11, 12], [13]]])
def test_prompts_keep_their_form(prompt: Any) -> None:
    found = filled({"prompt": prompt})["prompt"]
    assert type(found) is type(prompt)
    assert len(found) == len(prompt)
    assert found != prompt


def test_token_ids_are_others_and_the_same_where_they_were() -> None:
    first, second, third = filled({"prompt": [31, 31, 40]})["prompt"]
    assert first == second != third
    assert all(1000 <= token < 2000 for token in (first, third))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "tools", "tool_choice", "response_format", "stop", "json_schema", "stream_options", "seed"]
)


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON | st.lists(st.dictionaries(FIELDS, JSON)), max_size=5))
def test_nothing_that_a_client_sends_breaks_it(body: dict[str, Any]) -> None:
    found = filled(body)
    assert json.loads(json.dumps(found)) == found


def test_a_schema_without_end_is_cut() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"items": schema}
    assert json.dumps(schema).count('"items"') == 300
    assert json.dumps(filled({"json_schema": schema})).count('"items"') < 300
