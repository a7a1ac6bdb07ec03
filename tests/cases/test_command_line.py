"""Reported faults of other runtimes, as far as the command line can show them, over an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Opened, Result, cli, opened

__all__ = ["cli", "opened"]  # fixtures

Cli = Callable[..., Result]
EMOJI = "🦊👩‍💻한𝕏"


def test_b01_streamed_characters_are_whole_and_join_to_the_text(cli: Cli, opened: Opened) -> None:
    opened.answer = lambda prompt: EMOJI  # the tokens of this engine are single bytes
    deltas = [event["text"] for event in cli("run", "m", "hi", "--jsonl").jsonl() if event["event"] == "token"]
    assert "".join(deltas) == EMOJI
    assert "\ufffd" not in "".join(deltas)
    assert cli("run", "m", "hi").out == EMOJI + "\n"


@pytest.mark.parametrize(("n_tokens", "text"), [(3, ""), (4, "🦊"), (5, "🦊")])
def test_b01_a_character_cut_by_the_limit_is_dropped(cli: Cli, opened: Opened, n_tokens: int, text: str) -> None:
    opened.answer = lambda prompt: EMOJI
    document = cli("run", "m", "hi", "-n", str(n_tokens), "--json").json()
    assert (document["text"], document["finish_reason"]) == (text, "length")


@pytest.mark.parametrize(
    ("answer", "stops", "text", "reason"),
    [
        ("ab", ["abc"], "ab", "stop"),  # held as a possible stop, then the end token
        ("abcd", ["bc", "abcd"], "", "stop"),
        ("x END y", ["END"], "x ", "stop"),
        ("no match", [f"stop{i}" for i in range(16)], "no match", "stop"),
        ("the prompt is no answer", ["hi"], "the prompt is no answer", "stop"),
    ],
)
def test_b03_stops_cut_before_the_earliest_match_and_lose_nothing(
    cli: Cli, opened: Opened, answer: str, stops: list[str], text: str, reason: str
) -> None:
    opened.answer = lambda prompt: answer
    flags = [word for stop in stops for word in ("--stop", stop)]
    document = cli("run", "m", "hi", *flags, "--json").json()
    assert (document["text"], document["finish_reason"]) == (text, reason)


STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
STRICT += "{% if loop.index0 % 2 == 1 and m.role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
STRICT += "{{ m.content }}{% endfor %}"


def test_b08_a_refused_system_message_is_exit_2_in_the_templates_words(cli: Cli, opened: Opened) -> None:
    opened.template = STRICT
    result = cli("run", "m", "hi", "-s", "be kind")
    assert (result.code, result.out) == (2, "")
    assert "no system role" in result.err


@pytest.mark.parametrize("template", ["{{ messages[0].tools[0].type }}", "{{ messages[9].content[:5] }}"])
def test_b11_a_template_that_fails_is_a_sentence_with_its_line(cli: Cli, opened: Opened, template: str) -> None:
    opened.template = template
    result = cli("run", "m", "hi")
    assert (result.code, result.out) == (2, "")
    assert "line 1" in result.err
    assert "Traceback" not in result.err


def test_b12_a_prompt_beyond_the_context_is_refused_whole(cli: Cli, opened: Opened) -> None:
    result = cli("run", "m", "-s", "Password is ANANAS-7734", "word " * 3000 + "What is the password?", "--json")
    error = result.json()["error"]
    assert (result.code, error["code"]) == (5, "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"]
    assert error["largest_ctx"] >= 1
    assert opened.prompts == []


def test_b15_an_exact_repeat_is_answered_and_computes_its_last_token(cli: Cli, opened: Opened) -> None:
    result = cli("chat", "m", "--jsonl", "-t", "0", stdin="hi\n" + "/regen\n" * 2)
    answers = "".join(event["text"] for event in result.jsonl() if event["event"] == "token")
    assert answers == "Hello there." * 3
    admitted = [event for event in result.jsonl() if event["event"] == "admitted"]
    assert [event["cached_tokens"]["device"] for event in admitted[1:]] == [admitted[0]["prompt_tokens"] - 1] * 2


@pytest.mark.parametrize("kv", ["q8_0", "q4_0", "f16:q8_0"])
def test_b19_a_quantised_v_without_flash_attention_is_refused_with_both_ways_out(cli: Cli, tiny: Path, kv: str) -> None:
    result = cli("run", str(tiny / "llama-dense.gguf"), "hi", "--kv", kv, "--flash-attn", "off")
    assert (result.code, result.out) == (2, "")
    assert "--flash-attn on" in result.err
    assert "--kv " in result.err


def test_b19_a_quantised_k_alone_needs_no_flash_attention(cli: Cli, tiny: Path) -> None:
    flags = ["--raw", "-n", "2", "--threads", "1", "--kv", "q8_0:f16", "--flash-attn", "off"]
    assert cli("run", str(tiny / "llama-dense.gguf"), "12", *flags).code == 0
