"""`POST /v1/cache/explain`: a chat or completion body in, what is known of its prompt out, and nothing of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm.errors import TimedOut
from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.server.cache import EXPLAIN_PATH
from localllm.server.state import ServerSettings
from tests.server.fakes import Running, fake_supervisor, serving

CANARY = "zebra-4711"
SYSTEM = "You answer about the harbour. " * 6
CHAT = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When does it open?"}]}
COMPLETION = {"prompt": SYSTEM + "When?"}
CONFIG = RuntimeConfig(tiers=TierConfig(ram_bytes=1 << 20))


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(fake_supervisor(config=CONFIG)) as server:
        yield server


def explain(running: Running, body: dict[str, Any], **headers: str) -> Any:
    reply = running.post(EXPLAIN_PATH, body, headers)
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
def test_a_body_is_explained_as_it_would_be_answered(running: Running, path: str, body: dict[str, Any]) -> None:
    before = explain(running, body)
    assert (before["reason"], before["n_known_tokens"], before["tier"]) == ("never_seen", 0, None)
    answered = running.post(path, {**body, "max_tokens": 4}).json["usage"]
    assert before["n_prompt_tokens"] == answered["prompt_tokens"]
    after = explain(running, body)
    again = running.post(path, {**body, "max_tokens": 4}).json["usage"]
    assert after["n_known_tokens"] == again["prompt_tokens_details"]["cached_tokens"] == after["n_prompt_tokens"] - 1
    assert (after["reason"], after["diverges_at"], after["object"]) == ("complete", None, "cache.explanation")


def test_nothing_is_generated_and_nothing_is_kept(running: Running) -> None:
    for _ in range(3):
        assert explain(running, {**CHAT, "stream": True, "n": 2})["n_held_tokens"] == 0
    assert running.worker.requests == []
    assert running.worker.service.stats().n_rows == 0


def test_where_prompts_part_only_the_callers_own_words_are_told(running: Running) -> None:
    running.post("/v1/completions", {"prompt": f"The password of the harbour is {CANARY}.", "max_tokens": 4})
    reply = running.post(EXPLAIN_PATH, {"prompt": "The password of the harbour is ? Say it."})
    told = reply.json["diverges_at"]
    assert (told["text"], told["before"][-3:], told["after"]) == ("?", "is ", " Say it.")
    assert reply.json["reason"] == "never_seen"
    assert CANARY.encode() not in reply.body
    assert CANARY[0].encode() not in reply.body.partition(b'"diverges_at"')[2]


def test_isolated_clients_see_only_their_own_cache() -> None:
    settings = ServerSettings(is_cache_shared=False)
    with serving(fake_supervisor(config=CONFIG), settings) as running:
        mine, other = {"authorization": "Bearer mine"}, {"authorization": "Bearer other"}
        running.post("/v1/completions", {**COMPLETION, "max_tokens": 4}, mine)
        assert explain(running, COMPLETION, **mine)["reason"] == "complete"
        told = explain(running, COMPLETION, **other)
        assert (told["reason"], told["n_held_tokens"], told["age_s"]) == ("never_seen", 0, None)
        assert explain(running, COMPLETION)["n_held_tokens"] == 0


def test_a_request_that_asks_for_no_cache_is_told_so(running: Running) -> None:
    running.post("/v1/completions", {**COMPLETION, "max_tokens": 4})
    for wish in ({"cache": "off"}, {"cache_prompt": False}):
        told = explain(running, {**COMPLETION, **wish})
        assert (told["reason"], told["n_known_tokens"]) == ("off", 0)
        assert told["n_held_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 0}, "n"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "grammar": "root ::= 'a'"}, "grammar"),
    ],
)
def test_what_no_answer_could_be_given_to_is_not_explained(running: Running, body: dict[str, Any], field: str) -> None:
    reply = running.post(EXPLAIN_PATH, body)
    assert reply.status == 400
    assert reply.error["param"] in (field, None)


def test_a_body_without_a_prompt_is_told_both_names_that_it_may_have(running: Running) -> None:
    reply = running.post(EXPLAIN_PATH, {"foo": 1})
    assert reply.status == 400
    assert "neither messages nor a prompt" in reply.error["message"]


def test_a_header_tells_what_means_nothing_and_what_was_left_out(running: Running) -> None:
    system = f"x-anthropic-billing-header: cch=1;\n{SYSTEM}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    reply = running.post(EXPLAIN_PATH, {"messages": messages, "odd": 1})
    assert reply.headers["x-localllm-ignored-fields"] == "odd"
    assert reply.headers["x-localllm-left-out"] == "x-anthropic-billing-header"


def test_a_worker_that_does_not_answer_is_told(running: Running) -> None:
    running.worker.fails["explain"] = TimedOut("The model's process did not answer.", "try again")
    assert running.post(EXPLAIN_PATH, COMPLETION).status == 504
