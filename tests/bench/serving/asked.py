"""Asks and workloads made up for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.workloads.ask import Ask, Message, Session


def turn(*texts: str, max_tokens: int = 4, **fields: Any) -> Ask:
    """Return a chat of these texts, user and assistant in turn, after a system prompt all have in common."""
    messages: list[Message] = [{"role": "system", "content": "Be brief."}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return Ask("chat", max_tokens, messages=tuple(messages), **fields)


def conversation(name: str, n_turns: int = 3, **fields: Any) -> Session:
    """Return a session whose turns grow."""
    texts: list[str] = []
    asks: list[Ask] = []
    for n in range(n_turns):
        texts.append(f"{name} asks {n}")
        asks.append(turn(*texts, **fields))
        texts.append(f"{name} hears {n}")
    return tuple(asks)


@dataclass(frozen=True)
class MadeUp:
    """A workload of given sessions, again and again unless it is a trace."""

    given: Sequence[Session]
    spec: str = "made-up"
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_trace: bool = False

    def sessions(self, seed: int) -> Iterator[Session]:
        """Yield them."""
        while True:
            yield from self.given
            if self.is_trace:
                return


def chats(n: int = 40, n_turns: int = 3, **fields: Any) -> MadeUp:
    """Return a workload of conversations that grow."""
    return MadeUp([conversation(f"c{i}", n_turns, **fields) for i in range(n)])
