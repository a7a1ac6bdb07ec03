"""What a contract's rounds found so far: runs by candidate and cell, and how each candidate stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.contract.terms import Candidate, Cell, Key
from localllm.bench.reports.document import Document, is_used, run_value
from localllm.bench.stats.summaries import median


@dataclass(slots=True)
class Standing:
    """One candidate while it is measured; its owner is the run of the contract. `left_out`: why it is, "" = not."""

    candidate: Candidate
    ready_s: list[float] = field(default_factory=list)
    server: Mapping[str, Any] = field(default_factory=dict)
    probes: Any = None
    fills_length: bool = False
    notes: tuple[str, ...] = ()
    left_out: str = ""
    unsupported: dict[Key, str] = field(default_factory=dict)


class Measured:
    """Documents of runs by candidate and cell, each with its round; disturbed ones are kept and do not count."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, Key], list[dict[str, Any]]] = {}

    def add(self, candidate: Candidate, cell: Cell, run: dict[str, Any]) -> None:
        """Keep a run."""
        self._runs.setdefault((candidate.name, cell.key), []).append(run)

    def runs(self, candidate: str, key: Key) -> Sequence[Document]:
        """Return every run of a candidate at a cell."""
        return self._runs.get((candidate, key), [])

    def used(self, candidate: str, key: Key) -> list[Document]:
        """Return those that count: supported, undisturbed, with an answer or a failure to show."""
        return [run for run in self.runs(candidate, key) if is_used(run)]

    def values(self, candidate: str, key: Key, name: str) -> dict[int, float]:
        """Return a measure of the runs that count, by round; what was not measured is left out."""
        found = {int(run["round"]): run_value(run, name) for run in self.used(candidate, key)}
        return {round_: value for round_, value in found.items() if value is not None}

    def n_disturbed(self, candidate: str, key: Key) -> int:
        """Return how many runs were disturbed."""
        return sum(bool(run.get("disturbances")) for run in self.runs(candidate, key))


def middle(values: Mapping[int, float]) -> float | None:
    """Return the median over rounds; None for none."""
    return median(list(values.values())) if values else None
