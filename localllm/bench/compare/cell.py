"""What one result file says of one thing that was measured: what it was, and every number of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from localllm.bench import measures
from localllm.bench.measures import Kind, Measure
from localllm.errors import UsageError

Requests: TypeAlias = tuple[tuple[float, ...], ...]
"""For each request of a round, in order, its values of a measure: none, one, or many (gaps between pieces)."""

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a cell stands in. `fingerprint` None: it does not tell what it ran on.

    `tool`: what wrote it. `machine`: what it tells of the machine where it has no fingerprint.
    """

    path: str
    tool: str
    fingerprint: Mapping[str, Any] | None = None
    fingerprint_id: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """Which model. `sha256` of its files, () where unknown; two without are the same where they share a key."""

    name: str
    sha256: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()

    def is_same(self, other: Model) -> bool:
        """Say whether both are the same bytes, or where that is not known, called the same."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return bool(self.keys & other.keys)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one load, or one test of an engine.

    `facts`: what must agree for two to be comparable, by name. `settings`: what may differ (and is
    told). `samples`: by latency or test ("ttft", "tg128"), rounds of requests; `values`: by measure
    ("output_throughput", "ttft_p95"), one a round; latencies in ms, times in it in s. `input_lens`:
    of the requests of its only round, () where unknown or there are several. `doubts`: why it should
    not be used. `notes`: what was left out of it.
    """

    name: str
    origin: Origin
    model: Model
    facts: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, tuple[Requests, ...]] = field(default_factory=dict)
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tests: Mapping[str, Measure] = field(default_factory=dict)
    input_lens: tuple[float, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def has(self, of: Measure) -> bool:
        """Say whether there is a number of that measure."""
        return bool(self.values.get(of.name)) or any(
            values for requests in self.samples.get(of.base, ()) for values in requests
        )


def rate_of_test(name: str) -> Measure:
    """Return tokens a second of an engine's test ("tg128") as a measure: its median over repetitions."""
    return Measure(name, Kind.RATE, False, name, "p50")


def time_of_test(name: str) -> Measure:
    """Return the time that an engine's test takes ("start pp35") as a measure: its median over repetitions."""
    return Measure(name, Kind.LATENCY, True, name, "p50")


def measure_named(name: str, cells: list[Cell]) -> Measure:
    """Return a test of one of `cells`, or the measure of that name. Raises UsageError."""
    for cell in cells:
        if name in cell.tests:
            return cell.tests[name]
    tests = sorted({test for cell in cells for test in cell.tests})
    try:
        return measures.measure(name)
    except UsageError as error:
        raise UsageError(error.message, f"{', '.join(tests)}; {error.hint}" if tests else error.hint) from None


def shown(of: Measure, value: float) -> str:
    """Return a value as people read it; a test's rate in tokens a second."""
    is_test = of.name == of.base and bool(of.statistic)
    return f"{value:.4g} t/s" if is_test and of.kind is Kind.RATE else measures.text_of(of, value)
