"""Tools that an agent is given, calls of them and what they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.prose import Prose, filled, place, tag

_VERBS = {
    "read": "Read",
    "list": "List every entry of",
    "search": "Search",
    "write": "Write to",
    "close": "Close",
    "rename": "Rename",
    "compare": "Compare two versions of",
    "check": "Check",
    "move": "Move",
    "print": "Print",
}
_NOUNS = ("file", "folder", "ticket", "table", "page", "schedule", "inventory", "message", "report", "calendar")
_USES = (
    "Use it before anything is changed.",
    "It fails where the {noun} is locked by somebody else.",
    "It returns at most a few hundred lines; ask again for the rest.",
    "Nothing is sent outside.",
    "Prefer it over asking the user.",
    "It is slow: call it once and remember what it said.",
)
# Name, JSON schema, what it is, sample values.
_FIELDS: tuple[tuple[str, Mapping[str, Any], str, tuple[Any, ...]], ...] = (
    ("pattern", {"type": "string"}, "Words that must occur", ("pump", "late", "order 4", "valve")),
    ("limit", {"type": "integer"}, "At most so many results", (5, 10, 20, 50)),
    ("recursive", {"type": "boolean"}, "Whether to go into what lies below", (True, False)),
    ("order", {"type": "string", "enum": ["newest", "oldest", "name"]}, "How results are sorted", ("newest", "name")),
    ("since", {"type": "string"}, "The first date that counts, as YYYY-MM-DD", ("2021-03-04", "2019-11-30")),
    ("tags", {"type": "array", "items": {"type": "string"}}, "Marks that must all be set", (["urgent"], ["a", "b"])),
    ("reason", {"type": "string"}, "Why it is done, for the log", ("asked by the user", "found while checking")),
    ("encoding", {"type": "string", "enum": ["utf-8", "latin-1"]}, "How the text is stored", ("utf-8", "latin-1")),
    ("offset", {"type": "integer"}, "The first line that is wanted, from 0", (0, 40, 120)),
)
MOST = len(_VERBS) * len(_NOUNS)


def make_tools(draws: Draws, n: int) -> tuple[Mapping[str, Any], ...]:
    """Return `n` different function tools (at most MOST) in the form of OpenAI's API."""
    names = draws.shuffled([(verb, noun) for verb in _VERBS for noun in _NOUNS])[:n]
    return tuple(_tool(draws, verb, noun) for verb, noun in names)


def _tool(draws: Draws, verb: str, noun: str) -> Mapping[str, Any]:
    fields = draws.shuffled(_FIELDS)[: draws.between(1, 3)]
    properties = {"path": {"type": "string", "description": f"Which {noun}, as in {tag(draws)}/{place(draws).lower()}"}}
    properties |= {name: {**schema, "description": f"{effect}."} for name, schema, effect, _ in fields}
    uses = " ".join(draws.shuffled(_USES)[: draws.between(1, 3)]).format(noun=noun)
    return {
        "type": "function",
        "function": {
            "name": f"{verb}_{noun}",
            "description": f"{_VERBS[verb]} one {noun}. {uses}",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": ["path", *(name for name, *_ in fields[:1])],
                "additionalProperties": False,
            },
        },
    }


def arguments_for(draws: Draws, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a call that are valid under the tool's schema."""
    samples = {name: values for name, _, _, values in _FIELDS}
    required = tool["function"]["parameters"]["required"]
    return {
        name: draws.pick(samples[name]) if name in samples else f"{tag(draws)}/{place(draws).lower()}"
        for name in required
    }


def result_of(prose: Prose, draws: Draws, trade: str, n_words: int) -> str:
    """Return what a tool found: lines of a log, about `n_words` together."""

    def line() -> str:
        at = f"{draws.below(24):02}:{draws.below(60):02}:{draws.below(60):02}"
        return f"{at} {tag(draws)} {prose.sentence(draws, trade)}"

    return "\n".join(filled(line, n_words))
