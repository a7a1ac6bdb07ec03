"""Keeps what was sent and what came back, and says which request did not end in exactly one way.

Three witnesses must agree: the client that sent it, the id in the answer's headers, and the
server's own log, a line a request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.client.calls import End, Outcome


@dataclass(slots=True)
class History:
    """Requests by the id that was sent as x-request-id and as the call's label. One owner."""

    sent: set[str] = field(default_factory=set)
    ended: dict[str, Outcome] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @property
    def in_flight(self) -> set[str]:
        """Those that were sent and have not ended."""
        return self.sent - self.ended.keys()

    def began(self, request_id: str) -> None:
        """Note that a request is about to be sent."""
        if request_id in self.sent:
            self.broken.append(f"{request_id}: sent twice")
        self.sent.add(request_id)

    def keep(self, outcome: Outcome) -> None:
        """Note how a request ended."""
        name = outcome.label
        if name not in self.sent or name in self.ended:
            self.broken.append(f"{name}: a second end, {outcome.end.value}")
        if not outcome.end.is_proper:
            self.broken.append(f"{name}: {outcome.end.value}, {outcome.fault}")
        if outcome.status is not None and outcome.request_id != name:
            self.broken.append(f"{name}: answered under another id")
        if outcome.n_sends != 1:
            self.broken.append(f"{name}: sent {outcome.n_sends} times")
        self.ended[name] = outcome

    def check(self, log: Iterable[dict[str, Any]]) -> list[str]:
        """Return what is wrong, in words; `log`: the server's lines, after it stopped."""
        lines = [line for line in log if line.get("request_id") in self.sent]
        counts = Counter(line["request_id"] for line in lines)
        codes = {line["request_id"]: line.get("code") for line in lines}
        found = [*self.broken, *(f"{name}: no end" for name in sorted(self.in_flight))]
        for name, outcome in self.ended.items():
            if counts[name] != 1 and not (counts[name] == 0 and outcome.end is End.CANCELLED):
                found.append(f"{name}: {counts[name]} lines in the server's log")
            elif outcome.end is not End.CANCELLED and outcome.end.is_proper and codes[name] != outcome.status:
                found.append(f"{name}: status {outcome.status}, in the log {codes[name]}")
        return found


def log_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a server's log."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if value.get("event") == "request":
                yield value


@dataclass(slots=True)
class Texts:
    """Checks that the same prompt always gets the same greedy text, as far as each answer goes.

    For engines whose answer depends on the prompt alone. A text of another request would not fit.
    """

    _longest: dict[str, str] = field(default_factory=dict)
    mixed_up: list[str] = field(default_factory=list)

    def see(self, prompt: str, outcome: Outcome) -> None:
        """Compare an answer, or the beginning of one, with those before."""
        known, text = self._longest.get(prompt, ""), outcome.text
        n_common = min(len(known), len(text))
        if known[:n_common] != text[:n_common]:
            self.mixed_up.append(f"{outcome.label}: another text than before")
        elif len(text) > len(known):
            self._longest[prompt] = text
