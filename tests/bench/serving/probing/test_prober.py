"""Probes: each thing a server does or does not do is found, and nothing that it answers breaks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from localllm.bench.client.calls import Target
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.probing import asks
from localllm.bench.serving.probing.differences import differences
from localllm.bench.serving.probing.prober import probe, read
from localllm.bench.serving.probing.probes import Probes
from tests.bench.serving.probing.probed_server import JSON_ANSWER, MODEL_ANSWER, probed

On = Callable[[str, Mapping[str, Any]], "tuple[int, bytes] | None"]


@pytest.fixture(scope="module")
def good() -> Probes:
    return probed()


def test_a_server_that_does_everything_is_seen_to(good: Probes) -> None:
    assert good.failures == ()
    assert good.prompt_tokens == tuple(len(str(chat[-1]["content"])) for chat in asks.CHATS)
    assert [one is not None and one.text for one in good.greedy] == [MODEL_ANSWER] * len(asks.GREEDY)
    assert all(one is not None and one.repeats and len(one.steps) == 12 for one in good.greedy)
    assert good.n_right == len(asks.EXACT) == len(good.exact)
    assert good.sampling == "greedy"
    honours = (good.max_tokens, good.stop, good.ignore_eos, good.json_schema, good.offered_tools, good.forced_tools)
    assert honours == ("honoured",) * 6
    assert good.stream_equals_whole
    assert good.has_usage
    assert good.has_stream_usage
    assert good.has_cached_tokens
    assert differences({"a": good, "b": good}) == []


def test_text_completions_are_probed_by_their_own_route() -> None:
    paths: list[str] = []

    def on(path: str, fields: Mapping[str, Any]) -> None:
        paths.append(path)

    found = probed("openai-completions", on=on)
    assert set(paths) == {"/v1/completions"}
    assert found.json_schema == found.offered_tools == found.forced_tools == "refused"
    assert [one is not None and len(one.steps) for one in found.greedy] == [12] * len(asks.GREEDY)


@pytest.mark.parametrize(
    ("manners", "name", "value"),
    [
        ({"max_tokens": False}, "max_tokens", "ignored"),
        ({"stop": False}, "stop", "ignored"),
        ({"ignore_eos": False}, "ignore_eos", "ignored"),
        ({"json_schema": False}, "json_schema", "ignored"),
        ({"forced_tools": False}, "forced_tools", "ignored"),
        ({"sampled": True}, "sampling", "sampled"),
        ({"has_usage": False}, "has_usage", False),
        ({"has_stream_usage": False}, "has_stream_usage", False),
        ({"has_cached_tokens": False}, "has_cached_tokens", False),
        ({"stream_text": lambda text: text + "!"}, "stream_equals_whole", False),
        ({"answer": lambda question, n_before: ""}, "stop", "unclear"),
        ({"answer": lambda question, n_before: "one"}, "max_tokens", "unclear"),
    ],
)
def test_what_a_server_does_not_do_is_found(manners: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(probed(**manners), name) == value


def refusing(*names: str, status: int = 400) -> On:
    def on(path: str, fields: Mapping[str, Any]) -> tuple[int, bytes] | None:
        return (status, b'{"error": {"message": "no"}}') if any(name in fields for name in names) else None

    return on


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("response_format", "json_schema"),
        ("tools", "offered_tools"),
        ("tool_choice", "forced_tools"),
        ("ignore_eos", "ignore_eos"),
        ("stop", "stop"),
    ],
)
@pytest.mark.parametrize("status", [422])
def test_a_field_that_is_refused_is_refused(field: str, name: str, status: int) -> None:
    found = probed(on=refusing(field, status=status))
    assert getattr(found, name) == "refused"
    assert any(f"HTTP {status}" in failure for failure in found.failures)


def test_a_server_that_fails_is_not_taken_to_refuse() -> None:
    assert probed(on=refusing("response_format", status=500)).json_schema == "unclear"


def test_without_logprobs_the_texts_are_compared_alone() -> None:
    found = probed(on=refusing("logprobs"))
    assert [one is not None and (one.text, one.steps) for one in found.greedy] == [(MODEL_ANSWER, ())] * 4
    assert not found.failures


def test_an_unsteady_server_is_found_and_a_near_tie_is_not_one() -> None:
    def answer(question: str, n_before: int) -> str:
        return "one two three" if n_before % 2 else "one too three"

    unsteady = probed(answer=answer)
    assert [one is not None and one.repeats for one in unsteady.greedy] == [False] * 4
    tied = probed(answer=answer, near=lambda word: {"two": -1.2, "too": -1.3} if word in ("two", "too") else {})
    assert [one is not None and one.repeats for one in tied.greedy] == [True] * 4


def test_a_stream_may_part_from_the_whole_at_a_near_tie_alone() -> None:
    def stream(text: str) -> str:
        return text.replace("two", "too")

    near = {"two": {"too": -1.2}}
    assert probed(stream_text=stream, near=lambda word: near.get(word, {})).stream_equals_whole is True
    assert probed(stream_text=stream).stream_equals_whole is False


def test_a_right_answer_may_be_a_sentence() -> None:
    assert read("7 + 5 = 12.\nIs it?", asks.NUMBER) == "12"
    assert read("\n**No**, snow is white. Yes.", "yes|no") == "no"
    assert read("It begins with the letter C.", "[a-z]") == "c"
    assert read('"Lantern"', r"\w+") == "lantern"
    assert read("nowhere", "yes|no") == ""
    assert read("", r"\w+") == ""


def test_stated_defaults_are_told() -> None:
    llama = {"props": {"default_generation_settings": {"params": {"temperature": 0.8, "own": 1}}}}
    assert probed(facts=llama).stated_sampling == {"temperature": 0.8}

    def show(path: str, fields: Mapping[str, Any]) -> tuple[int, bytes] | None:
        return (200, b'{"parameters": "temperature 0.7\\nstop \\"x\\"\\ntop_k 20"}') if path == "/api/show" else None

    assert probed(facts={"api_version": {}}, on=show).stated_sampling == {"temperature": "0.7", "top_k": "20"}
    assert probed(facts={"props": 7}).stated_sampling == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"not json",
        b"\xff\xfe",
        b'{"choices": 7}',
        b'{"choices": []}',
        b'{"choices": [null]}',
        b'{"choices": [{"message": 3, "finish_reason": {}}], "usage": []}',
        b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop", "logprobs": {"content": [1, {}]}}]}',
        b'{"choices": [{"message": {"content": "x"}, "logprobs": {"tokens": [1], "top_logprobs": [[]]}}]}',
        b'{"choices": [{"text": "x", "logprobs": {"tokens": ["x"], "token_logprobs": [null], "top_logprobs": [{}]}}]}',
        b"[" * 100_000,
    ],
)
def test_no_answer_breaks_a_probe(body: bytes, good: Probes) -> None:
    found = probed(on=lambda path, fields: (200, body))
    assert found.max_tokens in ("unclear", "honoured", "ignored")
    assert any(difference.forbids_ranking for difference in differences({"good": good, "odd": found}))


def test_a_server_that_is_gone_breaks_no_probe() -> None:
    found = probe(Endpoint(Target("127.0.0.1", 1, timeout_s=1), "m", "openai-chat"))
    assert found.greedy == (None,) * 4
    assert found.prompt_tokens == (None,) * 4
    assert len(found.failures) > 20


def test_the_json_that_is_asked_for_is_not_in_the_question() -> None:
    ask = asks.json_ask()
    assert "colour" not in JSON_ANSWER[0]
    assert "JSON" not in str(ask.messages)
