"""What a workload asks, before it is known which server answers: requests, the conversations they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import msgspec

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload.

    `kind`: the workload that made it (of a mix: the part). Either `messages` (chat), or `prompt` with
    an optional `suffix` (text completion, fill in the middle). What several asks share stands before
    the last message; in a prompt, before its last line. `max_tokens`: the answer's limit, and its
    length where `is_free` (free text, whose length a server may be told to fill).
    `answer_type`: what a JSON answer must decode to; its schema is sent. `at_s`: seconds from the
    start at which a recorded request was sent. `extra`: more fields of the body (replay).
    """

    kind: str
    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    suffix: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    answer_type: type[msgspec.Struct] | None = None
    is_free: bool = True
    at_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def salted(self, salt: str) -> Ask:
        """Return the same ask with `salt` at the beginning of its text, so that no prefix of another serves it."""
        if self.prompt is not None:
            return replace(self, prompt=f"# {salt}\n{self.prompt}")
        first = dict(self.messages[0])
        first["content"] = f"[{salt}] {first.get('content') or ''}"
        tools = self.tools
        if tools and "function" in tools[0]:  # many templates write them before the first message
            function = dict(tools[0]["function"])
            function["description"] = f"[{salt}] {function.get('description') or ''}"
            tools = ({**tools[0], "function": function}, *tools[1:])
        return replace(self, messages=(first, *self.messages[1:]), tools=tools)

    def sibling(self) -> Ask:
        """Return an ask that shares this one's prefix and nothing after it, with an answer of one token."""
        if self.prompt is not None:
            head, newline, _ = self.prompt.rpartition("\n")
            return replace(self, prompt=head + newline or self.prompt, max_tokens=1, answer_type=None)
        last = {**self.messages[-1], "content": "Wait."}
        return replace(self, messages=(*self.messages[:-1], last), max_tokens=1, answer_type=None, tool_choice=None)


Session: TypeAlias = tuple[Ask, ...]
"""Asks of one conversation, each to be sent after the one before it ended."""


class Workload(Protocol):
    """A source of sessions: the same seed always gives the same ones, on every machine.

    `spec`: its canonical text, with every parameter that is not the default ("rag:documents=2"): two
    runs can be compared when it is equal. `facts`: its length distributions and what prefixes are
    shared, in words and numbers. `is_trace`: its asks have times of their own.
    """

    @property
    def spec(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def is_trace(self) -> bool: ...

    def sessions(self, seed: int) -> Iterator[Session]:
        """Yield sessions without end (of a trace: its requests, once)."""
        ...
