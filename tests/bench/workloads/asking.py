"""What the tests of workloads share: requests, and their text in the order in which a template may write it."""

from __future__ import annotations

import json
from itertools import islice

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.parse import parse_workload
from localllm.bench.workloads.registry import shipped

SHIPPED = tuple(shipped())
CHATS = tuple(name for name in SHIPPED if name != "fim")


def taken(text: str, n: int, seed: int = 1) -> list[Session]:
    return list(islice(parse_workload(text).sessions(seed), n))


def asks_of(text: str, n: int, seed: int = 1) -> list[Ask]:
    return [ask for session in taken(text, n, seed) for ask in session]


def before_last(ask: Ask) -> str:
    """What several requests may share: all but the last message, or all but the prompt's last line."""
    if ask.prompt is not None:
        return ask.prompt[: ask.prompt.rindex("\n") + 1]
    return flat_messages(ask, 1)


def flat(ask: Ask) -> str:
    """All that an ask says, in the order in which a template may write it."""
    if ask.prompt is not None:
        return f"{ask.prompt}\0{ask.suffix}"
    return flat_messages(ask, 0)


def flat_messages(ask: Ask, n_left_out: int) -> str:
    said = [
        f"<{message['role']}> {message['content']} {json.dumps(message.get('tool_calls', ''))}\n"
        for message in ask.messages[: len(ask.messages) - n_left_out]
    ]
    return "".join([*(f"{json.dumps(tool)}\n" for tool in ask.tools), *said])


def common(first: str, second: str) -> str:
    """Return the longest prefix of both."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return first[:low]
