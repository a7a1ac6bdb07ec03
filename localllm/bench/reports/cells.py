"""The documents' runs seen alike: who was measured, at what, in which rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.bench.reports.document import Document, is_used, run_value
from localllm.bench.serving.spec import Load
from localllm.bench.serving.sweep import Point, knee_of, pace_per_s
from localllm.bench.stats.summaries import median


@dataclass(frozen=True, slots=True)
class Cell:
    """One candidate ("" in the document of a single server) at one workload, cache and load; its rounds' documents."""

    candidate: str
    workload: str
    cache: str
    load: Load
    rounds: tuple[Document, ...]

    @property
    def used(self) -> list[Document]:
        """The rounds that count; of a single server, with no round in its place, a disturbed run too."""
        return [r for r in self.rounds if is_used(r if self.candidate else {**r, "disturbances": ()})]

    @property
    def is_disturbed(self) -> bool:
        """Whether what is shown of it should not be used."""
        return any(r.get("disturbances") for r in self.used)

    @property
    def unsupported(self) -> str:
        """Why the candidate cannot do this workload; "" where it can."""
        return next((str(r["unsupported"]) for r in self.rounds if r.get("unsupported")), "")

    def value(self, name: str) -> float | None:
        """Return the median over the used rounds of a measure; None where none has it."""
        found = [value for r in self.used if (value := run_value(r, name)) is not None]
        return median(found) if found else None

    def samples(self, field: str) -> list[float]:
        """Return the answered requests' entries of a list of the documents ("ttfts", "itls"), of all used rounds."""
        found: list[float] = []
        for r in self.used:
            for end, entry in zip(r.get("ends", ()), r.get(field, ()), strict=False):
                if end == "answer" and entry is not None:
                    found += entry if isinstance(entry, list) else [entry]
        return found


def load_of(told: Any) -> Load:
    """Return the load that a run's document tells."""
    found: Mapping[str, Any] = told if isinstance(told, Mapping) else {}
    return Load(found.get("concurrency"), found.get("rate_per_s"), found.get("shape") or 1.0)


def cells_of(document: Document) -> list[Cell]:
    """Return the cells of a serve or contract document, in its order."""
    if "localllm_bench_contract" in document:
        return [_contract_cell(cell) for cell in document.get("cells", ())]
    return [
        Cell("", str(run.get("workload", "")), str(run.get("cache", "")), load_of(run.get("load")), (run,))
        for run in document.get("runs", ())
    ]


def _contract_cell(cell: Document) -> Cell:
    rounds = tuple(cell.get("rounds", ()))
    load = load_of(rounds[0].get("load")) if rounds else Load()
    return Cell(str(cell["candidate"]), str(cell["workload"]), str(cell["cache"]), load, rounds)


def knee_load(cells: Sequence[Cell]) -> tuple[Load, str] | None:
    """Return the load of the knee among cells of one candidate at several loads, and the rule in words."""
    points = [_point(cell) for cell in cells if cell.used]
    found = knee_of(points) if len({str(point.load) for point in points}) > 1 else None
    return None if found is None else (found[0].load, found[1])


def _point(cell: Cell) -> Point:
    met = [r["slo"]["met"] for r in cell.used if r.get("slo")]
    offered, achieved = zip(*(_paces(r) for r in cell.used), strict=True)
    is_open = cell.load.concurrency is None
    answered = cell.value("request_throughput") or 0.0
    return Point(
        load=cell.load,
        output_tokens_per_s=cell.value("output_throughput") or 0.0,
        offered_per_s=median(offered) if is_open else 0.0,
        achieved_per_s=median(achieved) if is_open else answered,
        error_share=cell.value("error") or 0.0,
        meets_slo=all(met) if met else None,
    )


def _paces(run: Document) -> tuple[float, float]:
    """Return the requests and the answers a second of one run."""
    starts, latencies, ends = run["start_times"], run["latencies"], run["ends"]
    ended = [s + took for s, took, end in zip(starts, latencies, ends, strict=True) if end == "answer"]
    return pace_per_s(starts), pace_per_s(ended) * (len(ended) / len(starts) if starts else 0.0)


def distinct(values: Iterable[str]) -> list[str]:
    """Return the values without repetitions, in order of their first."""
    return list(dict.fromkeys(values))


def labels(cells: Sequence[Cell]) -> list[str]:
    """Return a name for each cell: its parts that are not the same in all, else the cache."""
    parts = [(cell.candidate, cell.workload, cell.cache, str(cell.load)) for cell in cells]
    differing = [i for i in range(4) if len({part[i] for part in parts}) > 1] or [2]
    return [", ".join(part[i] for i in differing if part[i]) for part in parts]
