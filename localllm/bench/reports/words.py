"""Numbers, facts and definitions as a report's reader meets them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.bench.machine.fingerprint import machine_line, machine_words
from localllm.bench.measures import measure, text_of
from localllm.bench.reports.page import Row

NONE = "-"
MAX_FACT_CHARS = 300

HOW = (
    "Time to first token (TTFT) counts from when a request was due, whether or not it could be sent then, to its first "
    "piece of text; a thought before the answer counts. The time to the first token of the answer is told apart where "
    "a model thinks first.",
    "Time per output token (TPOT) is the time from the first piece to the last, divided by the output tokens less one; "
    "the time between pieces (ITL) is between moments at which text arrived. End to end (E2E) ends with the answer.",
    "Time in the queue is what the server tells of itself; servers that tell none have none here.",
    "Only proper answers count for latencies and tokens. Refusals, error events, lost connections, malformed answers, "
    "time-outs and unreachable servers are errors; what was cancelled because the run ended is not counted at all.",
    "Percentiles are interpolated linearly. Throughput is over the time from when the first request was due to the "
    "last end. Goodput is the share of all requests that got a proper answer with each limited latency within its "
    "limit.",
    "cold: every request begins with text of its own, so nothing of it was computed before. warm: what a session "
    "begins with was sent before, and its later turns find what the turns before them left. restart: what every "
    "request begins with was sent before, then the server was stopped and started.",
    "Closed loop (concurrency): so many clients, each sending its next request when its last was answered. Open loop "
    "(rate): requests come at planned times whatever became of those before.",
    "One client measures every server: it notes when each piece was read from the socket and decodes after the answer "
    "ended. Its own cost is measured against a server that does nothing.",
)
HOW_CONTRACT = (
    "Candidates are measured in turn, round after round, so that a drift of the machine's speed falls on all. A value "
    "is the median over the rounds that count; a ratio's interval is a bootstrap of 95 %.",
    "Rounds in which the machine swapped, throttled or was loaded by others are marked and not used. A workload that "
    "a candidate cannot do is left out of its ranking.",
    "Before a ranking every candidate gets the same probe requests. Where they differ in a way that makes times "
    "incomparable, there is no ranking.",
)


def number(value: float | None) -> str:
    """Return a number with about three digits: "4.56", "45.6", "456"; "-" for None."""
    if value is None:
        return NONE
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def count(value: int | None) -> str:
    """Return a whole number; "-" for None."""
    return NONE if value is None else f"{value:d}"


def share(value: float | None) -> str:
    """Return a share of 1 in percent: "4.1%"; "-" for None."""
    return NONE if value is None else f"{100 * value:.3g}%"


def size(n_bytes: float | None) -> str:
    """Return bytes as "812 MB" or "1.21 GB"; "-" for None."""
    return measured("peak_memory", n_bytes)


def measured(name: str, value: float | None) -> str:
    """Return a measure's value with its unit; "-" for None. Raises UsageError where measures.py has no such name."""
    return NONE if value is None else text_of(measure(name), value)


def machine_facts(fingerprint: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the line on the machine, and the model's and the load's where they are known."""
    found = []
    if "machine" in fingerprint and "software" in fingerprint:
        of_others = "server" in fingerprint and not _is_ours(fingerprint["server"])
        found.append(machine_words(fingerprint) if of_others else machine_line(fingerprint))
    before, after = fingerprint.get("load_average_before"), fingerprint.get("load_average_after")
    if before and after:
        found.append(f"load average {before[0]:g} before, {after[0]:g} after")
    return tuple(found)


def _is_ours(server: Mapping[str, Any]) -> bool:
    return _mapping(server.get("model")).get("owned_by") == "localllm"


def flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[Row]:
    """Yield (name, value) of everything in nested facts, null and empty ones left out, long ones cut."""
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(place): item for place, item in enumerate(value, 1)}, f"{name}.")
        elif value not in (None, "", [], ()):
            yield name, cut(", ".join(map(fact_text, value)) if isinstance(value, (list, tuple)) else fact_text(value))


def fact_text(value: Any) -> str:
    """Return a fact as one line of text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {text}" for name, text in flat(value))
    return " ".join(str(value).split())


def cut(text: str, n_chars: int = MAX_FACT_CHARS) -> str:
    """Return `text`, ended with an ellipsis where it is longer."""
    return text if len(text) <= n_chars else text[: n_chars - 1] + "…"


def command_text(command: str | Sequence[str]) -> str:
    """Return a command as one types it."""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def version_text(server: Mapping[str, Any]) -> str:
    """Return what a server tells of its name and version; "" where it tells nothing."""
    name = server.get("server") or _mapping(server.get("model")).get("owned_by") or ""
    for key, inner in (("props", "build_info"), ("version", "version"), ("api_version", "version")):
        told = server.get(key)
        told = told.get(inner) if isinstance(told, Mapping) else told
        if told:
            return fact_text(f"{name} {told}" if name and str(name) not in str(told) else told)
    return fact_text(name)


def server_words(server: Mapping[str, Any]) -> list[str]:
    """Return what a server is and where: ["llama.cpp b7000", "at http://127.0.0.1:8080"], as far as it is known."""
    url = server.get("url")
    return [word for word in (version_text(server), f"at {fact_text(url)}" if url else "") if word]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
