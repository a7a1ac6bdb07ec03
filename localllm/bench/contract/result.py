"""A contract's result as one document: who was measured, what was found, who is ahead, which rules were kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from localllm.bench.contract.measured import Measured, Standing
from localllm.bench.contract.ranking import rankings
from localllm.bench.contract.rules import Judge
from localllm.bench.contract.terms import Cell, Contract
from localllm.bench.reports.document import plain
from localllm.bench.serving.probing.differences import Difference
from localllm.bench.serving.servers.starting import is_secret

VERSION = 1
_HIDDEN = "(not kept)"


@dataclass(slots=True)
class ContractResult:
    """What there is of a contract's result so far; its owner is the run of the contract."""

    contract: Contract
    standings: Mapping[str, Standing]
    differences_of: Callable[[Mapping[str, Any]], Sequence[Difference]]
    measured: Measured = field(default_factory=Measured)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    calibration: Any = None
    partial: bool = True

    def document(self) -> dict[str, Any]:
        """Return the document as it is now. Rules that nothing was measured for are not kept."""
        compared = _Compared(self)
        verdicts = [compared.judge.verdict(rule) for rule in self.contract.rules]
        ranking = list(rankings(self.contract.cells, compared.groups, self.measured))
        found = {
            "localllm_bench_contract": VERSION,
            "title": self.contract.title,
            "partial": self.partial,
            "contract": _without_secrets(self.contract.document),
            "contract_sha256": self.contract.sha256,
            "fingerprint": self.fingerprint,
            "calibration": self.calibration,
            "candidates": [_candidate(standing) for standing in self.standings.values()],
            "cells": [
                line
                for standing in self.standings.values()
                for cell in self.contract.cells
                for line in _cell(standing, cell, self.measured)
            ],
            "differences": compared.differences,
            "ranking": ranking or None,
            "no_ranking": " ".join(compared.reasons) or ("" if ranking else "No two candidates were measured alike."),
            "rules": verdicts,
            "passed": all(verdict["passed"] for verdict in verdicts),
        }
        document: dict[str, Any] = plain(found)
        return document


class _Compared:
    """Which candidates may be compared. `groups`: those of a model that may be ranked; `reasons`: why others not."""

    def __init__(self, result: ContractResult) -> None:
        self._result = result
        self.judge = Judge(result.standings, result.measured, cache(self._forbids))
        self.groups: dict[str, list[Standing]] = {}
        self.differences: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        for model in result.contract.models:
            group = [s for s in result.standings.values() if s.candidate.model is model and s.probes is not None]
            if len(group) < 2:
                continue
            found = result.differences_of({s.candidate.name: s.probes for s in group})
            self.differences += [{"model": model.name, **asdict(difference)} for difference in found]
            forbidding = [difference.sentence for difference in found if difference.forbids_ranking]
            if forbidding:
                self.reasons.append(f"{model.name}: not ranked. {' '.join(forbidding)}")
            else:
                self.groups[model.name] = [s for s in group if not s.left_out]

    def _forbids(self, one: str, other: str) -> str:
        """Return why two candidates of one model cannot be put in a ratio: they do not do the same work."""
        a, b = self._result.standings[one], self._result.standings[other]
        if a.candidate.model is not b.candidate.model or a.probes is None or b.probes is None:
            return ""
        found = self._result.differences_of({one: a.probes, other: b.probes})
        forbidding = [difference.sentence for difference in found if difference.forbids_ranking]
        return f"{one} and {other} cannot be compared: {' '.join(forbidding)}" if forbidding else ""


def _candidate(standing: Standing) -> dict[str, Any]:
    candidate = standing.candidate
    return {
        "name": candidate.name,
        "model": candidate.model.name,
        "command": list(candidate.command) or None,
        "url": candidate.url or None,
        "api": candidate.api,
        "is_best": candidate.is_best,
        "server": standing.server,
        "ready_s": standing.ready_s,
        "probes": standing.probes,
        "notes": list(standing.notes),
        "left_out": standing.left_out,
    }


def _cell(standing: Standing, cell: Cell, measured: Measured) -> list[dict[str, Any]]:
    """Return the cell's line, if it has any run."""
    name = standing.candidate.name
    runs = measured.runs(name, cell.key)
    workload, cache_, load = cell.key
    line = {"candidate": name, "workload": workload, "cache": cache_, "load": load, "rounds": list(runs)}
    counts = {"n_used": len(measured.used(name, cell.key)), "n_disturbed": measured.n_disturbed(name, cell.key)}
    return [line | counts] if runs else []


def _without_secrets(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the contract as written, without the values of variables that look like keys: results are passed on."""

    def shown(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: _HIDDEN if is_secret(name) else value for name, value in variables.items()}

    candidates = [
        {**each, "variables": shown(each["variables"])} if "variables" in each else each
        for each in document["candidate"]
    ]
    return {**document, "candidate": candidates}
