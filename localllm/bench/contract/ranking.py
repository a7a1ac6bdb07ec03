"""Orders the candidates of a model at each cell, where they may be ordered at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.bench.contract.measured import Measured, Standing, middle
from localllm.bench.contract.terms import Cell
from localllm.bench.measures import Measure
from localllm.bench.stats.summaries import paired_ratio

LEAST_PAIRS = 5
"""Rounds below which no interval of 95 % can tell two candidates apart: 2 x (1/2)^5 = 6 %."""
TOO_FEW = f"fewer than {LEAST_PAIRS} rounds cannot tell a difference from chance"


def rankings(
    cells: Sequence[Cell], groups: Mapping[str, Sequence[Standing]], measured: Measured
) -> Iterator[dict[str, Any]]:
    """Yield an order for each cell and model. `groups`: the candidates of each model that may be compared."""
    for cell in cells:
        for model, standings in groups.items():
            values = {
                standing.candidate.name: found
                for standing in standings
                if (found := measured.values(standing.candidate.name, cell.key, cell.by.name))
            }
            if len(values) > 1:
                workload, cache, load = cell.key
                at = {"model": model, "workload": workload, "cache": cache, "load": load}
                yield {**at, "by": cell.by.name, "order": order(values, cell.by)}


def order(values: Mapping[str, Mapping[int, float]], by: Measure) -> list[dict[str, Any]]:
    """Return the candidates, best first. `values`: of each, by round.

    `ratio`, `low`, `high`: the candidate's value over that of the first, in pairs of rounds, with the
    interval of their median; None where the first's is 0. `tied`: cannot be told from the first.
    """
    medians = {name: middle(of_one) or 0.0 for name, of_one in values.items()}
    names = sorted(medians, key=lambda name: medians[name], reverse=not by.lower_is_better)
    best = names[0]
    lines: list[dict[str, Any]] = [
        {"candidate": best, "value": medians[best], "ratio": 1.0, "low": 1.0, "high": 1.0, "tied": False}
    ]
    for name in names[1:]:
        lines.append({"candidate": name, "value": medians[name], **_against(values[name], values[best])})
    return lines


def _against(theirs: Mapping[int, float], best: Mapping[int, float]) -> dict[str, Any]:
    rounds = sorted(theirs.keys() & best.keys())
    pairs = [(theirs[r], best[r]) for r in rounds]
    found: dict[str, Any] = {"ratio": None, "low": None, "high": None, "tied": True, "n_pairs": len(pairs)}
    if pairs and all(a > 0 and b > 0 for a, b in pairs):
        ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
        found |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "tied": ratio.low <= 1 <= ratio.high}
    elif pairs:  # a share may be 0: then it is told by whether the one was above the other in every round
        found["tied"] = not (all(a > b for a, b in pairs) or all(a < b for a, b in pairs))
    if len(pairs) < LEAST_PAIRS:
        found |= {"tied": True, "why": TOO_FEW}
    return found
