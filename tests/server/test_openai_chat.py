"""Chat through the official client, unmodified: every parameter, both forms, typed errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from localllm.errors import EngineError, Poisoned, QueueFull, Unavailable
from localllm.runtime.types import ChatRequest
from localllm.server.state import ServerSettings
from tests.fake_engine import EOS, TEMPLATE, FakeEngine
from tests.server.fakes import Running, fake_supervisor, serving, wait_until

HELLO = [{"role": "user", "content": "hello"}]


def abc_and_end(tokens: Sequence[int]) -> int:
    """Answer "abc" and the end."""
    return {97: 98, 98: 99, 99: EOS}.get(int(tokens[-1]), 97)


def chat(running: Running, **body: Any) -> Any:
    return running.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, **body})


def submitted(running: Running) -> ChatRequest:
    request = running.worker.requests[-1]
    assert isinstance(request, ChatRequest)
    return request


def test_a_whole_answer_has_the_shape_that_the_client_types(running: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content or "") == 8
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_streamed_deltas_are_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=40)
    with client.chat.completions.create(model="fake", messages=HELLO, max_tokens=40, stream=True) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_accumulating_helper_of_the_client_takes_the_stream() -> None:
    with serving(fake_supervisor(FakeEngine(script=abc_and_end))) as running:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="x") as client:
            with client.chat.completions.stream(
                model="fake", messages=HELLO, n=2, logprobs=True, stream_options={"include_usage": True}
            ) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["abc", "abc"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_chunks_come_in_the_order_that_clients_need(running: Running) -> None:
    reply = chat(running, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    *chunks, end = reply.events
    assert end == "[DONE]"
    first, *content, finish, usage = chunks
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(list(c["choices"][0]["delta"]) == ["content"] and c["usage"] is None for c in content)
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert {(c["id"], c["created"], c["model"], c["system_fingerprint"], c["object"]) for c in chunks} == {
        (first["id"], first["created"], "fake", first["system_fingerprint"], "chat.completion.chunk")
    }


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_streamed_only_when_asked_for(running: Running, asked: Any) -> None:
    reply = chat(running, stream=True, stream_options=asked)
    assert all("usage" not in chunk for chunk in reply.events[:-1])
    assert all(chunk["choices"] for chunk in reply.events[:-1])


@pytest.mark.parametrize("fields", [{}, {"stop": ["c"]}, {"n": 2}, {"max_tokens": 1}])
def test_usage_of_a_stream_equals_that_of_the_whole(running: Running, fields: dict[str, Any]) -> None:
    chat(running, **fields)  # both find the same prefix
    whole = chat(running, **fields).json["usage"]
    streamed = chat(running, **fields, stream=True, stream_options={"include_usage": True}).events[-2]["usage"]
    assert streamed == whole


def test_usage_can_be_told_with_every_chunk(running: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(running, stream=True, stream_options=options).events[1:-2]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_options_reach_the_runtime_by_their_names(running: Running) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.1,
        "xtc_threshold": 0.2,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "logit_bias": {"65": 5},
    }
    reply = chat(running, **sampling, seed=7, min_tokens=2, max_tokens=4, ignore_eos=True, n=2, priority=3, stop="zzz")
    assert reply.status == 200
    options = submitted(running).options
    assert options.sampling == sampling
    assert (options.seed, options.min_tokens, options.max_tokens, options.ignore_eos) == (7, 2, 4, True)
    assert (options.n, options.priority, options.stop) == (2, 3, ("zzz",))


def test_the_client_sends_every_parameter_it_has(client: openai.OpenAI, running: Running) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "ann"}],
        frequency_penalty=0.1,
        logit_bias={"65": -100},
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=5,
        metadata={"a": "b"},
        n=1,
        parallel_tool_calls=True,
        presence_penalty=0.1,
        prompt_cache_key="k",
        reasoning_effort="low",
        response_format={"type": "text"},
        safety_identifier="s",
        seed=3,
        service_tier="auto",
        stop=["zz", "yy"],
        store=False,
        temperature=0.7,
        tool_choice="auto",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        top_p=0.9,
        user="me",
        verbosity="low",
        extra_body={"min_p": 0.1, "top_k": 40},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert submitted(running).options.max_tokens == 5
    assert submitted(running).options.sampling["min_p"] == 0.1


@pytest.mark.parametrize("body", [{"max_tokens": -1, "seed": -1}, {"max_tokens": None, "seed": None}, {}])
def test_no_limit_and_any_seed_can_be_spelled_three_ways(running: Running, body: dict[str, Any]) -> None:
    assert running.post("/v1/chat/completions", {"messages": HELLO, **body, "stop": ["a", "e", "i"]}).status == 200
    assert submitted(running).options.max_tokens is None
    assert submitted(running).options.seed is None


def test_chat_logprobs_have_an_entry_a_token(running: Running) -> None:
    for top, n in ((None, 0), (0, 0), (5, 5), (20, 20)):
        choice = chat(running, logprobs=True, top_logprobs=top).json["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["logprobs"]["refusal"] is None
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [n] * 8
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
        assert all(-9999 <= entry["logprob"] <= 0 for entry in content)
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content if n)


def test_streamed_logprobs_are_those_of_the_whole(running: Running) -> None:
    whole = chat(running, logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    chunks = chat(running, logprobs=True, top_logprobs=1, stream=True).events[:-1]
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in whole])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -2}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2**64 - 1}, "n"),
        ({"n": -1}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"seed": -5}, "seed"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"json_schema": {}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a", "tool_call_id": {}}]}, "messages[1].tool_call_id"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": "x"}]}, "messages[1].tool_calls"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [1]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": 1}]}]}, "messages[1].tool_calls[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
                ]
            },
            "messages[1].content[1]",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_a_plain_400_that_names_it(
    running: Running, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    reply = chat(running, **{"stream": stream, **fields})
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.error) >= {"message", "type", "param", "code"}
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert isinstance(reply.error["code"], str)


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_empty_turns_are_turns(running: Running, role: str, content: Any) -> None:
    messages = [{"role": role, "content": content}, *HELLO]
    assert running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2}).status == 200
    assert running.post("/v1/chat/completions", {"messages": [{"role": role}], "max_tokens": 2}).status == 200


def test_history_with_tool_calls_and_null_content_is_taken(running: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    for stream in (False, True):
        reply = running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": stream})
        assert reply.status == 200


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_tools_are_rendered_and_said_so() -> None:
    template = TEMPLATE.replace("{% for m", "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m", 1)
    with serving(fake_supervisor(template=template)) as running:
        n_without = chat(running).json["usage"]["prompt_tokens"]
        for choice in ("auto", "none", None):
            for stream in (False, True):
                reply = chat(running, tools=TOOLS, tool_choice=choice, stream=stream)
                assert reply.headers["x-localllm-tools"] == "rendered"
            assert list(submitted(running).tools) == TOOLS
        assert chat(running, tools=TOOLS).json["usage"]["prompt_tokens"] == n_without + 2
        assert "x-localllm-tools" not in chat(running).headers


def test_tools_that_the_template_knows_nothing_of_are_said_to_be_ignored(running: Running) -> None:
    assert chat(running, tools=TOOLS).headers["x-localllm-tools"] == "ignored-by-template"


def test_unknown_fields_are_listed_and_inert_ones_are_not(running: Running) -> None:
    reply = chat(running, zeta=1, alpha={"x": 1}, user="me", store=True, **{"odd\r\nname: x": 1})
    assert reply.status == 200
    assert reply.headers["x-localllm-ignored-fields"] == "alpha, ?, zeta"
    assert "x-localllm-ignored-fields" not in chat(running, metadata={}, reasoning_effort="high").headers
    reply = chat(running, stream=True, stream_options={"include_usage": True, "other": True})
    assert reply.headers["x-localllm-ignored-fields"] == "stream_options.other"


def test_strict_refuses_unknown_fields() -> None:
    with serving(settings=ServerSettings(strict=True)) as running:
        reply = chat(running, zeta=1)
        assert (reply.status, reply.error["param"]) == (400, "zeta")
        assert chat(running, user="me").status == 200


def test_template_arguments_reach_the_template(running: Running) -> None:
    assert chat(running, chat_template_kwargs={"enable_thinking": False}).status == 200
    assert submitted(running).template_kwargs == {"enable_thinking": False}


def test_a_limit_beyond_the_room_is_clipped_and_said_so(running: Running) -> None:
    reply = chat(running, max_tokens=100_000, stop=["a", "b", "c"])
    limit = 4096 - reply.json["usage"]["prompt_tokens"]
    assert reply.headers["x-localllm-max-tokens"] == str(limit)
    assert reply.json["timings"]["max_tokens"] == limit
    assert reply.json["timings"]["max_tokens_asked"] == 100_000
    assert "x-localllm-max-tokens" not in chat(running).headers


def test_times_are_told_with_usage_and_all_phases_on_request(running: Running) -> None:
    timings = chat(running).json["timings"]
    assert set(timings) == {
        *("cache_n", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"),
        *("predicted_per_second", "queue_ms"),
    }
    assert timings["predicted_n"] == 8
    timeline = chat(running, timings=True).json["timings"]["timeline_ms"]
    assert {"queue", "template", "tokenise", "match", "prefill", "decode", "sample", "ipc"} <= set(timeline)
    streamed = chat(running, timings=True, stream=True).events[-2]
    assert streamed["choices"] == []
    assert "usage" not in streamed
    assert "timeline_ms" in streamed["timings"]


def test_headers_tell_cached_tokens_and_the_queue(running: Running) -> None:
    chat(running)
    for stream in (False, True):
        reply = chat(running, stream=stream)
        n_cached = int(reply.headers["x-localllm-cached-tokens"])
        assert n_cached > 0
        assert _tiers(reply.headers["x-localllm-cached-by-tier"]) == {"device": n_cached, "ram": 0, "disk": 0}
        assert float(reply.headers["x-localllm-queue-ms"]) >= 0


def _tiers(header: str) -> dict[str, int]:
    return {tier: int(n) for tier, _, n in (part.partition("=") for part in header.split(", "))}


def test_a_request_may_want_no_cache(running: Running) -> None:
    long = [{"role": "user", "content": "A prompt that nobody has sent before, and that is long enough. " * 3}]

    def n_cached(**body: Any) -> int:
        return int(chat(running, messages=long, **body).headers["x-localllm-cached-tokens"])

    assert [n_cached(cache="off"), n_cached(cache="off")] == [0, 0]
    assert n_cached(cache="on") < 10  # what every prompt begins with
    assert n_cached(cache=None) > 100
    assert n_cached(cache="off") == 0
    assert n_cached(cache="on", cache_prompt=False) == 0
    assert submitted(running).options.cache == "on"
    for wrong in ("pin", "", "ON", True, 0, ["off"]):  # to pin is the server's user's
        reply = chat(running, cache=wrong)
        assert (reply.status, reply.error["param"]) == (400, "cache")


def test_the_callers_request_id_is_kept_where_it_can_go_anywhere(running: Running) -> None:
    reply = running.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, {"x-request-id": "my-id.1"})
    assert reply.headers["x-request-id"] == "my-id.1"
    assert submitted(running).request_id == "my-id.1"
    assert reply.json["id"] == "chatcmpl-my-id.1"
    wait_until(lambda: "request_id=my-id.1" in running.log.getvalue())
    for bad in ("", "a b", "x" * 65, "ü"):
        sent = {"x-request-id": bad.encode().decode("latin-1")}
        reply = running.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, sent)
        assert len(reply.headers["x-request-id"]) == 24


def test_errors_are_the_clients_typed_ones(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert "fake" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 5000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    assert isinstance(long.value.body, dict)
    assert long.value.body["n_ctx"] == 4096


@pytest.mark.parametrize(
    ("error", "kind", "n_tries"),
    [
        (QueueFull("full", "later"), openai.RateLimitError, 3),
        (Unavailable("loading", retry_after_s=0.01, state="loading"), openai.InternalServerError, 3),
        (EngineError("a step failed"), openai.InternalServerError, 1),
        (Poisoned("it kills"), openai.UnprocessableEntityError, 1),
    ],
)
def test_the_client_tries_again_when_that_helps(error: Any, kind: type[Exception], n_tries: int) -> None:
    with serving() as running:
        running.worker.fails["submit"] = error
        with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=2) as client:
            for stream in (False, True):
                running.worker.requests.clear()
                with pytest.raises(kind):
                    client.with_options(max_retries=2 if not stream else 0).chat.completions.create(
                        model="fake", messages=HELLO, stream=stream
                    )
                assert len(running.worker.requests) == (1 if stream else n_tries)


def test_the_async_client_streams_and_cancels() -> None:
    engine = FakeEngine(script=lambda tokens: 65)  # never ends by itself
    with serving(fake_supervisor(engine)) as running:

        async def ask() -> int:
            async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="x") as client:
                stream = await client.chat.completions.create(
                    model="fake", messages=HELLO, stream=True, max_tokens=4000
                )
                n_chunks = 0
                async for _ in stream:
                    n_chunks += 1
                    if n_chunks == 5:
                        break
                await stream.close()
                answers = await asyncio.gather(
                    *(client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3) for _ in range(4))
                )
                return sum(answer.usage.completion_tokens for answer in answers if answer.usage)

        assert asyncio.run(ask()) == 12
        stats = running.worker.service.stats()
        assert stats.n_running == 0
        assert running.state.n_active == 0


def test_an_end_token_and_a_stop_text_give_the_same_reason() -> None:
    with serving(fake_supervisor(FakeEngine(script=abc_and_end))) as running:
        ended = chat(running).json["choices"][0]
        assert (ended["message"]["content"], ended["finish_reason"]) == ("abc", "stop")
        stopped = chat(running, stop=["bc"]).json["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("a", "stop")
        streamed = chat(running, stop=["bcd"], stream=True).events[:-1]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == "abc"
        with_logprobs = chat(running, stop=["bc"], logprobs=True, stream=True).events[:-1]
        told = [c["choices"][0]["logprobs"] for c in with_logprobs]
        assert sum(len(entry["content"]) for entry in told if entry) == 3  # also of text that was cut


def test_a_character_of_several_tokens_is_one_delta() -> None:
    fox = "🦊".encode()
    with serving(fake_supervisor(FakeEngine(script=lambda tokens: fox[len(tokens) % 4]))) as running:
        reply = chat(running, stream=True, max_tokens=16, logprobs=True)
        contents = [c["choices"][0]["delta"].get("content") for c in reply.events[:-1]]
        assert "\ufffd" not in json.dumps(contents)
        entries = [
            e for c in reply.events[:-1] if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]
        ]
        assert len(entries) == 16
