"""`agent`: a long system prompt, tools, a history that grows by calls and results, and branches from its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.bench.workloads.ask import Ask, Message, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import choice, count, spread, tokens, words
from localllm.bench.workloads.prose import Prose, filled, n_words, place
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing
from localllm.bench.workloads.tools import MOST, arguments_for, make_tools, result_of

_CALL_WORDS = 7  # of a call: its name and arguments, on average
_SECTION_WORDS = 120
_CLOSING_WORDS = 20  # of what the assistant says before the branches


@dataclass(frozen=True, slots=True)
class AgentParameters:
    """How long an agent's prompt is, how many calls precede, how many ways lead on."""

    system: int = words(900, "the system prompt, the same in all sessions")
    tools: int = count(8, 1, MOST, "tools, the same in all sessions")
    steps: int = count(3, 0, 200, "requests after each of which comes a scripted tool call and its result")
    branches: int = count(3, 1, 200, "requests that go on from the same history in different ways")
    task: int = words(30, "what the user asks")
    result: int = words(80, "what a tool returned")
    answer: int = tokens(64, "at most an answer")
    choice: str = choice("auto", ("required",), "whether the model must call a tool")
    spread: float = spread(0.3)


def _sessions(of: AgentParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    lengths = _lengths(of)
    shared = Draws(seed, "agent")
    trade = shared.pick(prose.trades)
    system = {"role": "system", "content": _system(prose, shared, trade, of.system)}
    tools = make_tools(shared, of.tools)
    at = 0
    while True:
        draws = Draws(seed, "agent", at)
        chat: list[Message] = [system]
        asks: list[Ask] = []

        if of.steps:
            chat.append(_task(prose, draws, trade, lengths))
        for _ in range(of.steps):
            asks.append(_ask(of, tools, chat))
            chat += _called(prose, draws, trade, draws.pick(tools), lengths["result"].draw(draws))
        if of.steps:
            chat.append({"role": "assistant", "content": prose.text(draws, trade, _CLOSING_WORDS, "advice")})
        asks += [_ask(of, tools, [*chat, _task(prose, draws, trade, lengths)]) for _ in range(of.branches)]
        yield tuple(asks)
        at += 1


def _ask(of: AgentParameters, tools: tuple[Mapping[str, Any], ...], messages: Sequence[Message]) -> Ask:
    return Ask("agent", of.answer, messages=tuple(messages), tools=tools, tool_choice=of.choice, is_free=False)


def _system(prose: Prose, draws: Draws, trade: str, length: int) -> str:
    """Return a system prompt of `length` words: who the assistant is, then rules under headings."""
    parts = [f"You are the assistant of the {trade} of {place(draws)}. Use the tools that you are given."]
    missing = length - n_words(parts[0])
    while missing > 0:
        heading = f"## {prose.phrase(draws, trade, 'goods').capitalize()}"
        room = max(1, min(missing, _SECTION_WORDS) - n_words(heading))
        rules = filled(lambda: f"- {prose.sentence(draws, trade, 'rule')}", room)
        parts.append("\n".join([heading, *rules]))
        missing -= n_words(parts[-1])
    return "\n\n".join(parts)


def _task(prose: Prose, draws: Draws, trade: str, lengths: Mapping[str, Lengths]) -> Message:
    question = prose.sentence(draws, trade, "question")
    facts = prose.text(draws, trade, lengths["task"].draw(draws) - n_words(question))
    return {"role": "user", "content": f"{facts} {question}".lstrip()}


def _called(prose: Prose, draws: Draws, trade: str, tool: Mapping[str, Any], length: int) -> list[Message]:
    """Return a call of `tool` and its result, as messages."""
    name = tool["function"]["name"]
    # Nine letters and digits: what the strictest templates (Mistral's) take.
    call_id = f"call{draws.between(10_000, 99_999)}"
    arguments = json.dumps(arguments_for(draws, tool))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": call_id,
            "name": name,
            "content": result_of(prose, draws, trade, length),
        },
    ]


def _lengths(of: AgentParameters) -> Mapping[str, Lengths]:
    return {
        "system": Lengths(of.system, 0),
        "task": Lengths(of.task, of.spread),
        "result": Lengths(of.result, of.spread),
        "answer": Lengths(of.answer, 0, "tokens"),
    }


def _sharing(of: AgentParameters) -> Sharing:
    lengths = _lengths(of)
    tools = n_words(json.dumps(make_tools(Draws(0, "agent"), of.tools)))
    head, task, result = tools + of.system, lengths["task"].mean, lengths["result"].mean
    step = _CALL_WORDS + result
    history = head + (task + of.steps * step + _CLOSING_WORDS if of.steps else 0)
    growing = [head + task + at * step for at in range(of.steps)]
    before = [words - (result if at else task) for at, words in enumerate(growing)]
    whole = sum(growing) + of.branches * (history + task)
    earlier = [head, *growing[:-1]] if of.steps else []
    repeated = sum(earlier) + (growing[-1] if of.steps else head) + (of.branches - 1) * history
    parts = (
        Shared("tools and system prompt", "all requests", "1"),
        Shared("the history of calls and results", "the later requests of a session", "1 a session"),
    )
    return Sharing(parts, repeated / whole, (sum(before) + of.branches * history) / whole)


AGENT = Recipe(
    name="agent",
    effect="tools, a long system prompt, a history of calls and several ways on from it",
    parameters=AgentParameters,
    sessions=_sessions,
    n_asks=lambda of: of.steps + of.branches,
    lengths=_lengths,
    sharing=_sharing,
)
