"""The cells of a contract: each workload at each of its loads and caches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from localllm.bench.contract.places import Place, Places
from localllm.bench.contract.tables import ContractTable, WorkloadTable
from localllm.bench.contract.terms import Cell
from localllm.bench.measures import Measure, measure
from localllm.bench.serving.spec import Cache, Load
from localllm.bench.serving.spelling import load_at, split_cache
from localllm.bench.slo import Slo, parse_slo
from localllm.bench.workloads.ask import Workload
from localllm.bench.workloads.parse import parse_workload
from localllm.errors import UsageError

MAX_CELLS = 1_000
NEEDS_SLO = ("goodput", "request_goodput")
OF_START = "ready"
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?::gamma=([0-9]+(?:\.[0-9]+)?))?")


def cells_of(table: ContractTable, places: Places, folder: Path) -> tuple[Cell, ...]:
    """Return every cell in the contract's order. Raises UsageError naming the place."""
    found: dict[tuple[str, str, str], Cell] = {}
    for index, each in enumerate(table.workload):
        place = places.of("workload", index)
        for cell in _cells(each, table.run.requests, place, folder):
            if cell.key in found:
                raise place.mistake(f"{', '.join(cell.key)} is measured twice.", hint="name each once")
            found[cell.key] = cell
            if len(found) > MAX_CELLS:
                raise place.mistake(f"it measures more than {MAX_CELLS} things.")
    return tuple(found.values())


def _cells(table: WorkloadTable, n_requests: int, place: Place, folder: Path) -> list[Cell]:
    with place.at("use"):
        text, asked = split_cache(table.use)
        workload = parse_workload(_beside(text, folder))
    with place.at("slo"):
        slo = None if table.slo is None else parse_slo(table.slo)
        if slo is not None and any(limit.measure.name in (OF_START, *NEEDS_SLO) for limit in slo.limits):
            raise UsageError("an SLO limits latencies, errors and rates, not the start or goodput.", "ttft_p95=500ms")
    limit = table.requests
    if limit is None and table.duration_s is None and not workload.is_trace:
        limit = n_requests
    return [
        Cell(workload, cache, load, _by(table, load, slo, place), limit, table.duration_s, slo)
        for cache in _caches(table, asked, place)
        for load in _loads(table, workload, place)
    ]


def _beside(use: str, folder: Path) -> str:
    """Return the workload's text with a trace's file looked for beside the contract."""
    for start in ("replay:", "replay "):
        if use.strip().startswith(start):
            return "replay:" + str(folder / use.strip().removeprefix(start).strip())
    return use


def _caches(table: WorkloadTable, asked: Sequence[Cache] | None, place: Place) -> list[Cache]:
    """Return the protocols, which stand in a key of their own or in the workload's text."""
    if table.cache is None:
        return list(asked or (Cache.COLD,))
    if asked is not None:
        raise place.mistake("the workload's text asks for a cache too: say it once.", "cache")
    names = [table.cache] if isinstance(table.cache, str) else table.cache
    known = [cache.value for cache in Cache]
    for name in names:
        if name not in known:
            raise place.mistake(f"cache takes {', '.join(known)}, not {name!r}.", "cache")
    if not names:
        raise place.mistake("cache is an empty list.", "cache", f'cache = ["{known[0]}"]')
    return [Cache(name) for name in names]


def _loads(table: WorkloadTable, workload: Workload, place: Place) -> list[Load]:
    if table.concurrency is not None and table.rate is not None:
        raise place.mistake("a workload has concurrency or rate, not both.", "rate", "write it as two workloads")
    if table.rate is not None:
        rates = table.rate if isinstance(table.rate, list) else [table.rate]
        with place.at("rate"):
            loads = [_rate(rate) for rate in rates]
    elif table.concurrency is not None:
        clients = table.concurrency if isinstance(table.concurrency, list) else [table.concurrency]
        loads = [Load(concurrency=n) for n in clients]
    else:
        loads = [Load() if workload.is_trace else Load(concurrency=1)]
    if not loads:
        raise place.mistake("it names no load.", hint="concurrency = [1, 4]")
    return loads


def _rate(rate: float | str) -> Load:
    """Return the load written as 2, "2" or "2:gamma=0.5"."""
    found = _RATE.fullmatch(rate.strip()) if isinstance(rate, str) else None
    rate_per_s = float(found[1]) if found else rate if isinstance(rate, (int, float)) else 0.0
    shape = float(found[2]) if found and found[2] else 1.0
    try:
        return load_at(float(rate_per_s), shape)
    except UsageError:
        raise UsageError(f"{rate!r} is no rate of requests a second.", 'rate = [0.5, "2:gamma=0.5"]') from None


def _by(table: WorkloadTable, load: Load, slo: Slo | None, place: Place) -> Measure:
    """Return what ranks: as said, else goodput under an SLO, output where clients wait, TTFT where they do not."""
    if table.by is None:
        default = "output_throughput" if load.concurrency is not None else "ttft_p95"
        return measure("goodput" if slo is not None else default)
    with place.at("by"):
        found = measure(table.by)
        if found.name == OF_START:
            raise UsageError("the start is not of a workload: a rule may limit it.", '[[rule]] measure = "ready"')
        if slo is None and found.name in NEEDS_SLO:
            raise UsageError(f"{found.name} needs an SLO.", 'slo = "ttft_p95=500ms,error=0"')
    return found
