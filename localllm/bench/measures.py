"""The names of what is measured, as flags, rules and files spell them, and how a value of each is written and read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from localllm.errors import UsageError


class Kind(Enum):
    """What a measure's number is."""

    LATENCY = "ms"
    RATE = "/s"
    SHARE = "share"
    BYTES = "bytes"
    JOULES = "J"


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a run: `name` ("ttft_p95", "output_throughput"), its kind, and which way is better.

    `base` and `statistic`: "ttft" and "p95" where it is taken over requests, else the name and "".
    """

    name: str
    kind: Kind
    lower_is_better: bool
    base: str
    statistic: str = ""


LATENCIES = {
    "ttft": "time to first token",
    "answer_ttft": "time to the first token of the answer, after reasoning",
    "tpot": "time per output token after the first",
    "itl": "time between pieces of text",
    "e2e": "time to the end of the answer",
    "queue": "time in the server's queue, as it tells",
}
STATISTICS = ("min", "mean", "p50", "p90", "p95", "p99", "max")
_SCALARS = {
    "error": (Kind.SHARE, True, "requests that got no proper answer"),
    "goodput": (Kind.SHARE, False, "requests within the SLO"),
    "request_goodput": (Kind.RATE, False, "requests within the SLO a second"),
    "request_throughput": (Kind.RATE, False, "answers a second"),
    "output_throughput": (Kind.RATE, False, "output tokens a second"),
    "total_token_throughput": (Kind.RATE, False, "prompt and output tokens a second"),
    "cached_share": (Kind.SHARE, False, "prompt tokens served from a cache"),
    "accepted_share": (Kind.SHARE, False, "drafted tokens that were accepted"),
    "valid_share": (Kind.SHARE, False, "answers valid under their schema"),
    "peak_memory": (Kind.BYTES, True, "peak memory of the server's processes"),
    "joules_per_token": (Kind.JOULES, True, "energy an output token"),
    "ready": (Kind.LATENCY, True, "from the server's start until it answers"),
}
SCALARS = tuple(_SCALARS)

_VALUE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%/]*)")
_FACTORS = {
    Kind.LATENCY: {"ms": 1.0, "s": 1e3, "us": 1e-3},
    Kind.RATE: {"": 1.0, "/s": 1.0},
    Kind.SHARE: {"": 1.0, "%": 0.01},
    Kind.BYTES: {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    Kind.JOULES: {"": 1.0, "J": 1.0, "mJ": 1e-3},
}


def measure(name: str) -> Measure:
    """Return the measure of that name. Raises UsageError with the names there are."""
    base, _, statistic = name.rpartition("_")
    if base in LATENCIES and statistic in STATISTICS:
        return Measure(name, Kind.LATENCY, True, base, statistic)
    if name in _SCALARS:
        kind, lower, _ = _SCALARS[name]
        return Measure(name, kind, lower, name)
    if name in LATENCIES:
        raise UsageError(f"{name} needs a statistic.", f"{name}_p95, or one of: {', '.join(STATISTICS)}")
    raise UsageError(
        f"{name!r} is no measure.",
        f"{', '.join(LATENCIES)} with {', '.join('_' + s for s in STATISTICS)}; {', '.join(SCALARS)}",
    )


def what(name: str) -> str:
    """Return what a measure is in words. Raises UsageError as `measure`."""
    found = measure(name)
    if found.statistic:
        return f"{LATENCIES[found.base]}, {found.statistic}"
    return _SCALARS[name][2]


def value_of(of: Measure, text: str) -> float:
    """Return a value in the measure's own unit (ms, a second, share of 1, bytes, J). Raises UsageError.

    A latency and bytes must name their unit: "500ms", "2s", "8GB"; a share is "0.05" or "5%".
    """
    found, factors = _VALUE.fullmatch(text.strip()), _FACTORS[of.kind]
    if found is None or found[2] not in factors:
        units = ", ".join(unit for unit in factors if unit)
        raise UsageError(f"{of.name}: {text!r} is no value for it.", f"a number and its unit: {units}")
    value = float(found[1]) * factors[found[2]]
    if of.kind is Kind.SHARE and value > 1:
        raise UsageError(f"{of.name}: {text!r} is more than all.", "a share is 0 to 1, or 0% to 100%")
    return value


def text_of(of: Measure, value: float) -> str:
    """Return a value as people read it: "482 ms", "1.3 /s", "4.1%", "1.21 GB"."""
    match of.kind:
        case Kind.LATENCY:
            return (
                f"{value / 1e3:.2f} s" if value >= 10_000 else f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"
            )
        case Kind.RATE:
            return f"{value:.3g} /s" if value < 100 else f"{value:.0f} /s"
        case Kind.SHARE:
            return f"{100 * value:.3g}%"
        case Kind.BYTES:
            return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
        case Kind.JOULES:
            return f"{value:.3g} J"
