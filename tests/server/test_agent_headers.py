"""One line of one known agent is left out, where it begins the system text; nothing else is ever changed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

from localllm.server.agent_headers import HEADER, leave_out
from localllm.server.state import ServerSettings
from tests.server.fakes import Running, fake_supervisor, serving

LINE = "x-anthropic-billing-header: cc_version=2.1.15.abc; cc_entrypoint=cli; cch=12345;"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as running:
        yield running


def left(content: Any, role: str = "system", *, is_kept: bool = False) -> tuple[Any, dict[str, str]]:
    messages = [{"role": role, "content": content, "name": "x"}, USER]
    before = copy.deepcopy(messages)
    kept, told = leave_out(messages, is_kept=is_kept)
    assert messages == before
    assert list(kept[1:]) == [USER]
    assert {**kept[0], "content": None} == {**before[0], "content": None}
    return kept[0]["content"], told


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("x-anthropic-billing-header:cch=1;\nYou are kind.", "You are kind."),
        ("x-anthropic-billing-header: cch=1; \nYou: a=b;", "You: a=b;"),
        (LINE + "\nYou are kind.", "You are kind."),
        (LINE + "\r\nYou are kind.", "You are kind."),
        (LINE + "\n\n  You are kind.\n", "\n  You are kind.\n"),
        (LINE, ""),
        (LINE + "\n", ""),
        (f"{LINE}\n{LINE}\nx", f"{LINE}\nx"),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "You"}], [{"type": "text", "text": "You"}]),
        ([{"type": "text", "text": LINE + "\n"}, "You"], ["You"]),
        (
            [{"type": "text", "text": LINE + "\nYou", "cache_control": {"type": "ephemeral"}}, "are"],
            [{"type": "text", "text": "You", "cache_control": {"type": "ephemeral"}}, "are"],
        ),
        ([LINE + "\nYou", "are"], ["You", "are"]),
        ([{"type": "input_text", "text": LINE}], []),
    ],
)
def test_the_line_is_left_out_and_told(given: Any, kept: Any, role: str) -> None:
    assert left(given, role) == (kept, {HEADER: "x-anthropic-billing-header"})
    assert left(given, role, is_kept=True) == (given, {})


@pytest.mark.parametrize(
    "given",
    [
        "You are kind.\n" + LINE,
        " " + LINE + "\nx",
        "\n" + LINE + "\nx",
        "\ufeff" + LINE + "\nx",
        LINE.upper() + "\nx",
        "x-anthropic-billing-header cch=1;\nx",
        "x-anthropic-billing-headers: cch=1;\nx",
        "x-anthropic-billing-header: cch=1\nx",
        "x-anthropic-billing-header:\nx",
        "x-anthropic-billing-header: is sent by some agents; say so.\nx",
        LINE + " You are kind.\nBe brief.",
        LINE + "You are kind.",
        "x-anthropic-billing-header: cc_version=2.1; be kind; cch=1;\nx",
        "x-anthropic-billing-header: a note = two words;\nx",
        [LINE + " You are kind.", "are"],
        [{"type": "text", "text": LINE + " You"}, {"type": "text", "text": "are"}],
        "x-anthropic-other-header: cch=1;\nx",
        "X-Billing: 1\nx",
        "",
        None,
        [],
        [{"type": "text", "text": "You"}, {"type": "text", "text": LINE}],
        ["", LINE],
        [{"type": "refusal", "refusal": LINE}],
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
    ],
)
def test_nothing_else_is_changed(given: Any) -> None:
    assert left(given) == (given, {})


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "System"])
def test_nor_is_another_role(role: str) -> None:
    assert left(LINE + "\nx", role) == (LINE + "\nx", {})


def test_nor_is_a_later_message() -> None:
    messages = [USER, {"role": "system", "content": LINE + "\nx"}]
    assert leave_out(messages, is_kept=False) == (messages, {})
    assert leave_out([], is_kept=False) == ([], {})


def chat(cch: int) -> list[dict[str, Any]]:
    system = f"x-anthropic-billing-header: cc_version=1; cch={cch};\n" + "You are an agent. " * 10
    return [{"role": "system", "content": system}, USER]


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agents_prompt_is_found_again_and_the_answer_says_why(running: Running, is_stream: bool) -> None:
    for cch in (1, 2):
        sent = {"messages": chat(cch), "max_tokens": 2, "stream": is_stream}
        reply = running.post("/v1/chat/completions", sent)
        assert reply.headers[HEADER] == "x-anthropic-billing-header"
    assert int(reply.headers["x-localllm-cached-tokens"]) > 150
    plain = running.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, "stream": is_stream})
    assert HEADER not in plain.headers


def test_the_template_route_shows_what_the_model_sees(running: Running) -> None:
    reply = running.post("/apply-template", {"messages": chat(1)})
    assert "billing" not in reply.json["prompt"]
    assert reply.headers[HEADER] == "x-anthropic-billing-header"


def test_the_switch_keeps_it() -> None:
    with serving(fake_supervisor(), ServerSettings(keeps_agent_headers=True)) as running:
        reply = running.post("/v1/chat/completions", {"messages": chat(7), "max_tokens": 2})
        assert HEADER not in reply.headers
        assert running.worker.requests[-1].messages[0]["content"] == chat(7)[0]["content"]
        assert "cch=7" in running.post("/apply-template", {"messages": chat(7)}).json["prompt"]


def test_a_line_of_a_million_pairs_is_looked_at_in_no_time() -> None:
    started_s = time.monotonic()
    text = "x-anthropic-billing-header:" + " a=b;" * 1_000_000 + " x" + " " * 1_000_000 + "y"
    assert left(text) == (text, {})
    assert time.monotonic() - started_s < 5
