"""Runs one workload at several loads, after each cache protocol: fixed loads, or a sweep to the knee."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from localllm.bench.serving.result import RunResult
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.sweep import PROBE_CLIENTS, Knee, Point, Sweep, knee, next_load, point

Measure: TypeAlias = Callable[[RunSpec], RunResult]
Keep: TypeAlias = Callable[[RunResult], None]


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads to measure: those of `fixed`, or those that a sweep chooses. `shape`: of a sweep's arrivals."""

    fixed: tuple[Load, ...] = ()
    sweep: Sweep | None = None
    shape: float = 1.0

    @property
    def has_knee(self) -> bool:
        """Whether there are several loads to find a knee among."""
        return self.sweep is not None or len(self.fixed) > 1

    def caches(self) -> tuple[Cache, ...]:
        """Return the protocols where none are asked for: several rates would make warm runs many and long."""
        is_open = self.sweep is Sweep.RATES or any(load.concurrency is None for load in self.fixed)
        return (Cache.COLD,) if is_open and self.has_knee else (Cache.COLD, Cache.WARM)


def run_series(measure: Measure, spec: RunSpec, caches: Sequence[Cache], loads: Loads, keep: Keep) -> None:
    """Measure `spec` under every protocol at every load; `keep` hears of each run as it ends.

    Ends after a run that is partial or that the endpoint does not support.
    """
    for cache in caches:
        of_cache = replace(spec, cache=cache)
        goes_on = _sweep(measure, of_cache, loads, keep) if loads.sweep else _fixed(measure, of_cache, loads, keep)
        if not goes_on:
            return


def _fixed(measure: Measure, spec: RunSpec, loads: Loads, keep: Keep) -> bool:
    for load in loads.fixed:
        result = measure(replace(spec, load=load))
        keep(result)
        if result.partial or result.unsupported:
            return False
    return True


def _sweep(measure: Measure, spec: RunSpec, loads: Loads, keep: Keep) -> bool:
    assert loads.sweep is not None
    points: list[Point] = []
    note = ""
    while (load := next_load(loads.sweep, points, loads.shape)) is not None:
        result = measure(replace(spec, load=load))
        if result.partial or result.unsupported:
            keep(result)
            return False
        found = point(result, spec.slo)
        if loads.sweep is Sweep.RATES and not points:
            note = (
                f"the rates are shares of what {PROBE_CLIENTS} clients got: {found.achieved_per_s:.3g} answers a second"
            )
        else:
            keep(replace(result, notes=(note, *result.notes)) if note else result)
        points.append(found)
    return True


def knees(results: Sequence[RunResult]) -> list[Knee]:
    """Return the knee of each protocol's runs, where there is one."""
    found: list[Knee] = []
    for cache in dict.fromkeys(result.spec.cache for result in results):
        of_cache = [result for result in results if result.spec.cache is cache]
        one = knee(of_cache, of_cache[0].spec.slo)
        if one is not None:
            found.append(one)
    return found
