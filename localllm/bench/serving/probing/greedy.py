"""Greedy answers token by token, with what was nearly chosen instead: where two part, it shows whether that means much.

Sums done in another order move a logit a little, so two servers of one model may part where two
words are nearly equal. Where they part although one of them was sure, they do not do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from localllm.bench.client.loose import as_dict, as_list, as_text
from localllm.bench.serving.probing.asks import NEAR_TIE


@dataclass(frozen=True, slots=True)
class Step:
    """One token as it is spelt, and those that were within NEAR_TIE nats of it."""

    token: str
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Greedy:
    """An answer at temperature 0. `steps`: () where the server tells no logprobs.

    `repeats`: asked again, it was the same byte for byte, or parted at a near tie.
    """

    text: str
    finish_reason: str = ""
    steps: tuple[Step, ...] = ()
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part: after so many characters that are the same, and whether both held the two words equal."""

    n_characters: int
    is_near_tie: bool


def parting(one: Greedy, other: Greedy) -> Parting | None:
    """Return where two answers part; None where they do not."""
    if one.text == other.text:
        return None
    n_same = sum(1 for _ in takewhile(_are_equal, zip(one.text, other.text, strict=False)))
    pairs = zip(one.steps, other.steps, strict=False)
    first = next(((a, b) for a, b in pairs if a.token != b.token), None)
    is_near_tie = first is not None and first[1].token in first[0].near and first[0].token in first[1].near
    return Parting(n_same, is_near_tie)


def is_nearly(known: Greedy, text: str) -> bool:
    """Say whether a text that came without logprobs is the known answer, or parts from it at a near tie."""
    at = 0
    for step in known.steps:
        if not text.startswith(step.token, at):
            return any(near and text.startswith(near, at) for near in step.near)
        at += len(step.token)
    return text == known.text


def greedy_of(body: Any) -> Greedy | None:
    """Return the answer in a body of either API; None where there is none."""
    choices = as_list(as_dict(body).get("choices"))
    if not choices:
        return None
    choice = as_dict(choices[0])
    message = choice.get("message")
    text = as_text(choice.get("text") if message is None else as_dict(message).get("content"))
    return Greedy(text, as_text(choice.get("finish_reason")), _steps(as_dict(choice.get("logprobs"))))


def _are_equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _steps(logprobs: Mapping[str, Any]) -> tuple[Step, ...]:
    """Read logprobs in the shape of chat, or in the older one of completions."""
    steps = []
    for entry in map(as_dict, as_list(logprobs.get("content"))):
        others = [(as_text(other.get("token")), other.get("logprob")) for other in _entries(entry.get("top_logprobs"))]
        steps.append(_step(as_text(entry.get("token")), entry.get("logprob"), others))
    if steps:
        return tuple(steps)
    tokens, own = as_list(logprobs.get("tokens")), as_list(logprobs.get("token_logprobs"))
    tops = map(as_dict, as_list(logprobs.get("top_logprobs")))
    for token, logprob, top in zip(tokens, own, tops, strict=False):
        steps.append(_step(as_text(token), logprob, list(top.items())))
    return tuple(steps)


def _entries(value: Any) -> list[dict[str, Any]]:
    return [as_dict(entry) for entry in as_list(value)]


def _step(token: str, logprob: Any, others: list[tuple[str, Any]]) -> Step:
    near = [other for other, its in others if other != token and _is_number(its) and its >= _number(logprob) - NEAR_TIE]
    return Step(token, tuple(near))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else float("inf")
