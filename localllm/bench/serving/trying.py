"""Tries a workload's first asks, so that what an endpoint does not do is told and not measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.serving.asks import each_its_own, first_of_each_kind
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.failures import KEY_REFUSED, MAX_CHARACTERS, UNSUPPORTED, failure_of, key_refused
from localllm.bench.serving.wire import call_of, cannot_send, is_valid
from localllm.bench.workloads.ask import Ask
from localllm.errors import ServerUnreachable

N_TRIES = 3
"""Of a JSON answer: one that a model breaks off says nothing of the server."""
FEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Tried:
    """What a trial found: why the endpoint cannot do it ("" where it can), and whether it counts tokens.

    `answer_s`: seconds that the quickest of these answers would take at its full length; None without one.
    """

    unsupported: str = ""
    has_usage: bool = True
    answer_s: float | None = None


async def try_asks(endpoint: Endpoint, asks: Sequence[Ask], stop: asyncio.Event) -> Tried:
    """Send the first ask of each kind, salted. Raises ServerUnreachable where the key is not taken."""
    client = Client(endpoint.target)
    answers: list[tuple[Ask, Outcome]] = []
    try:
        for kind, some in first_of_each_kind(asks, N_TRIES).items():
            if stop.is_set():
                break
            why = cannot_send(some[0], endpoint.api) or await _try(client, endpoint, some, answers, stop)
            if why:
                told = why if len({ask.kind for ask in asks}) == 1 else f"{kind}: {why}"
                return Tried(unsupported=told[:MAX_CHARACTERS])
    finally:
        client.close()
    return Tried(
        has_usage=all(outcome.completion_tokens is not None for _, outcome in answers),
        answer_s=min((_full_answer_s(ask, outcome) for ask, outcome in answers), default=None),
    )


async def _try(
    client: Client, endpoint: Endpoint, asks: Sequence[Ask], answers: list[tuple[Ask, Outcome]], stop: asyncio.Event
) -> str:
    """Return why these asks of one kind are not done; "" where they are, or where that was not found out."""
    salted = each_its_own()
    if asks[0].suffix is not None and await _ignores_suffix(client, endpoint, salted(asks[0])):
        return "the server takes a suffix and does nothing with it"
    problems: list[str] = []
    tries = [asks[i % len(asks)] for i in range(N_TRIES)]
    for ask in tries:
        if stop.is_set():
            return ""
        is_judged = ask.answer_type is not None or _is_forced(ask)
        short = ask if is_judged else replace(ask, max_tokens=min(ask.max_tokens, FEW_TOKENS))
        outcome = await client.send(call_of(salted(short), endpoint, fills_length=False))
        check_answering(endpoint, outcome)
        if outcome.end in (End.REFUSED, End.MALFORMED) and outcome.status in UNSUPPORTED:
            return failure_of(outcome)
        if outcome.end is End.ANSWER:
            answers.append((ask, outcome))
        problem = _problem(ask, outcome)
        if not problem:
            return ""
        problems.append(problem)
    return problems[0]


async def _ignores_suffix(client: Client, endpoint: Endpoint, ask: Ask) -> bool:
    """Say whether a prompt is no longer for the text that is to come after the answer."""
    n_tokens: list[int] = []
    for suffix in (ask.suffix, None):
        outcome = await client.send(call_of(replace(ask, suffix=suffix, max_tokens=1), endpoint, fills_length=False))
        if outcome.end is not End.ANSWER or outcome.prompt_tokens is None:
            return False
        n_tokens.append(outcome.prompt_tokens)
    return n_tokens[0] <= n_tokens[1]


def _full_answer_s(ask: Ask, outcome: Outcome) -> float:
    """Return the seconds that an answer would have taken if it had gone on to its limit at its pace."""
    passed_s, n_pieces = outcome.ended_s - outcome.started_s, len(outcome.token_s)
    if n_pieces < 2:
        return passed_s
    pace_s = (outcome.token_s[-1] - outcome.token_s[0]) / (n_pieces - 1)
    return passed_s + pace_s * max(0, ask.max_tokens - (outcome.completion_tokens or n_pieces))


def _is_forced(ask: Ask) -> bool:
    return ask.tool_choice not in (None, "auto", "none")


def _problem(ask: Ask, outcome: Outcome) -> str:
    """Say what of an answer shows that the server does not do what it was asked; "" where nothing does."""
    if outcome.end is not End.ANSWER:
        return ""
    if _is_forced(ask) and not outcome.tool_calls:
        return "the answer calls no tool, though one was demanded"
    if is_valid(ask, outcome.text) is False and "length" not in outcome.finish_reasons:
        return "the answer is not valid under the schema that was sent"
    return ""


def check_answering(endpoint: Endpoint, outcome: Outcome) -> None:
    """Raise ServerUnreachable where a short request shows that no other will be answered.

    The server refuses the key, or asks for one, though it lists its models to anybody; or it did not end a short
    answer in all the time there is.
    """
    who = str(endpoint.facts.get("url", endpoint.target.host))
    if outcome.end is End.TIMED_OUT:
        raise ServerUnreachable(f"{who} does not answer a short request: {outcome.fault}.", "look at the server's log")
    if outcome.end is End.REFUSED and outcome.status in KEY_REFUSED:
        has_key = any(name == "authorization" for name, _ in endpoint.target.headers)
        raise key_refused(who, has_key=has_key, status=outcome.status)
