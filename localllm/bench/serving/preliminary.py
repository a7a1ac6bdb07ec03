"""Finds out, before anything is measured, what an endpoint makes of `ignore_eos` and how it counts tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.serving.endpoint import Endpoint, count_tokens
from localllm.bench.serving.trying import check_answering
from localllm.bench.serving.wire import call_of
from localllm.bench.workloads.ask import Ask

QUESTIONS = (
    ("Say yes.", 32),
    ("What is 2 + 2? Answer with the number alone.", 32),
    ("Name the capital of France in one word.", 32),
    ("Say yes.", 256),
)
"""What most models answer in few tokens, with most tokens of an answer; the last is for those that think first."""
N_BEYOND = 8
"""Tokens past its natural end that an answer is told to go on."""
TOLERANCE_TOKENS = 3
TOLERANCE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Preliminary:
    """What was found out. `fills_length`: an answer told to ignore its end goes on to its limit."""

    fills_length: bool
    notes: tuple[str, ...] = ()


def examine(endpoint: Endpoint) -> Preliminary:
    """Ask a few short questions. Raises ServerUnreachable where the key is not taken."""
    return asyncio.run(_examined(endpoint))


async def _examined(endpoint: Endpoint) -> Preliminary:
    client = Client(endpoint.target)
    asked = replace(endpoint, api="openai-chat")  # a text that is completed seldom ends by itself, a chat does
    notes: tuple[str, ...] = ()
    try:
        for question, most_tokens in QUESTIONS:
            natural = await _answer(client, asked, question, most_tokens)
            if natural.end is End.REFUSED and asked.api != endpoint.api:
                asked = endpoint
                continue
            if natural.end is not End.ANSWER:
                break
            notes = notes or await _checked(endpoint, natural)
            n_tokens = natural.output_tokens
            if n_tokens < most_tokens:  # it ended by itself: now it can be seen whether it is made to go on
                beyond = n_tokens + N_BEYOND
                filled = await _answer(client, asked, question, beyond, fills=True)
                return Preliminary(filled.end is End.ANSWER and filled.output_tokens >= beyond, notes)
        return Preliminary(False, notes)
    finally:
        client.close()


async def _answer(client: Client, endpoint: Endpoint, question: str, n_tokens: int, *, fills: bool = False) -> Outcome:
    ask = Ask("preliminary", n_tokens, messages=({"role": "user", "content": question},))
    outcome = await client.send(call_of(ask, endpoint, fills_length=fills, keep_text=True))
    check_answering(endpoint, outcome)
    return outcome


async def _checked(endpoint: Endpoint, outcome: Outcome) -> tuple[str, ...]:
    """Return a note where the tokens that the server says it gave are not those of its text."""
    said = outcome.completion_tokens
    if said is None or outcome.tool_calls or not outcome.text:
        return ()
    counted = await count_tokens(endpoint, outcome.text)
    if counted is None or abs(said - counted.n_tokens) <= max(TOLERANCE_TOKENS, TOLERANCE_SHARE * counted.n_tokens):
        return ()
    who = "its /tokenize" if counted.source == "server tokenizer" else "the model's own file"
    return (f"the server's usage says {said} tokens where {who} counts {counted.n_tokens}",)
