"""What one experiment on kept KV came to, and what it owes: a figure that is owed and not there is missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.stats.summaries import Estimate, estimate
from proof.figures import Figure
from proof.output import tell


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a figure, before it is measured."""

    what: str
    asked: float
    at_least: bool = False
    unit: str = ""

    def of(self, found: Estimate) -> Figure:
        """Return the figure of an estimate: reached where the median is; the interval stands beside it."""
        return self.at(found.median, found.low, found.high, found.n)

    def at(self, value: float, low: float | None = None, high: float | None = None, n: int = 1) -> Figure:
        """Return the figure of a value."""
        return Figure(self.what, self.asked, self.at_least, value, self.unit, low, high, n)

    def worst(self, values: Sequence[float]) -> Figure:
        """Return the figure of the worst of some values, with their range."""
        value = min(values) if self.at_least else max(values)
        return self.at(value, min(values), max(values), len(values))

    def missed(self, why: str) -> dict[str, Any]:
        """Return, for the result file, the line of a figure that was not measured."""
        return {**self.at(0.0).line(), "value": None, "n": 0, "reached": False, "missing": why}


@dataclass(frozen=True, slots=True)
class Beside:
    """One measure of several servers, `values` by their names, to stand beside ours."""

    what: str
    unit: str
    values: Mapping[str, Sequence[float]]

    def line(self) -> dict[str, Any]:
        """Return it for the result file."""
        by_side = {name: _plain(estimate(values)) for name, values in self.values.items() if values}
        return {"what": self.what, "unit": self.unit, "sides": by_side}


@dataclass(frozen=True, slots=True)
class Part:
    """What one experiment came to. `lacks`: why it proves nothing, "" where it did what was to be measured."""

    figures: Sequence[Figure] = ()
    beside: Sequence[Beside] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    lacks: str = ""

    def __add__(self, other: Part) -> Part:
        """Return both as one."""
        lacks = "; ".join(filter(None, (self.lacks, other.lacks)))
        figures, beside = [*self.figures, *other.figures], [*self.beside, *other.beside]
        return Part(figures, beside, {**self.facts, **other.facts}, lacks)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment: its name, the figures that it owes, and how it is made."""

    name: str
    owes: Sequence[Asked]
    run: Callable[[], Part]

    def figures(self, part: Part) -> list[dict[str, Any]]:
        """Return the lines of all figures: those that are owed and not there, or prove nothing, are missed."""
        lines = {} if part.lacks else {figure.what: figure.line() for figure in part.figures}
        for owed in self.owes:
            lines.setdefault(owed.what, owed.missed(part.lacks or "not measured"))
        return list(lines.values())


def told(lines: Sequence[Mapping[str, Any]]) -> None:
    """Say what was found."""
    for line in lines:
        value = f"{'none':>8s}" if line["value"] is None else f"{line['value']:8.3f}"
        why = f" ({line['missing']})" if "missing" in line else ""
        tell(f"  {'reached' if line['reached'] else 'missed '} {value} {line['unit']:2s} {line['what']}{why}")


def _plain(found: Estimate) -> dict[str, float]:
    return {"median": found.median, "low": found.low, "high": found.high, "n": found.n}
