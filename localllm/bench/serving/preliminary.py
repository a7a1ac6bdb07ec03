"""Finds out, before anything is measured, what an endpoint makes of `ignore_eos` and how it counts tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.serving.endpoint import Endpoint, count_tokens
from localllm.bench.serving.trying import check_key
from localllm.bench.serving.wire import call_of
from localllm.bench.workloads.ask import Ask

MAX_TOKENS = 32
TOLERANCE_TOKENS = 3
TOLERANCE_SHARE = 0.1
QUESTIONS = (
    "Say yes.",
    "What is 2 + 2? Answer with the number alone.",
    "Name the capital of France in one word.",
)
"""Their answers end early, with most models."""


@dataclass(frozen=True, slots=True)
class Preliminary:
    """What was found out. `fills_length`: an answer told to ignore its end goes on to its limit."""

    fills_length: bool
    notes: tuple[str, ...] = ()


def examine(endpoint: Endpoint) -> Preliminary:
    """Ask a few short questions. Raises ServerUnreachable where the key is not taken."""
    return asyncio.run(_examined(endpoint))


def fills_length(endpoint: Endpoint) -> bool:
    """Say whether the endpoint honours `ignore_eos`. Raises as `examine`."""
    return examine(endpoint).fills_length


async def _examined(endpoint: Endpoint) -> Preliminary:
    client = Client(endpoint.target)
    notes: list[str] = []
    fills = False
    try:
        for number, question in enumerate(QUESTIONS):
            natural = await _answer(client, endpoint, question, fills=False)
            if natural.end is not End.ANSWER:
                break
            if number == 0:
                notes += await _checked(endpoint, natural)
            if _n_tokens(natural) < MAX_TOKENS:  # it ends by itself: now it can be seen whether it is made to go on
                filled = await _answer(client, endpoint, question, fills=True)
                fills = filled.end is End.ANSWER and _n_tokens(filled) >= MAX_TOKENS
                break
    finally:
        client.close()
    return Preliminary(fills, tuple(notes))


async def _answer(client: Client, endpoint: Endpoint, question: str, *, fills: bool) -> Outcome:
    messages = ({"role": "user", "content": question},)
    ask = Ask("preliminary", MAX_TOKENS, messages=messages)
    outcome = await client.send(call_of(ask, endpoint, fills_length=fills, keep_text=True))
    check_key(endpoint, outcome)
    return outcome


def _n_tokens(outcome: Outcome) -> int:
    return len(outcome.token_s) if outcome.completion_tokens is None else outcome.completion_tokens


async def _checked(endpoint: Endpoint, outcome: Outcome) -> list[str]:
    """Return a note where the tokens that the server says it gave are not those of its text."""
    said = outcome.completion_tokens
    if said is None or outcome.tool_calls or not outcome.text:
        return []
    counted = await count_tokens(endpoint, outcome.text)
    if counted is None or abs(said - counted) <= max(TOLERANCE_TOKENS, TOLERANCE_SHARE * counted):
        return []
    return [f"the server's usage says {said} tokens where its /tokenize counts {counted}"]
