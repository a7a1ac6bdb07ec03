"""From the flags of `bench serve` to what is to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.bench.serving.series import Loads
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.spelling import parse_loads, split_cache
from localllm.bench.slo import parse_slo
from localllm.bench.workloads.parse import parse_workload
from localllm.cli.bench.options import RunFlags
from localllm.cli.units import parse_duration
from localllm.errors import UsageError

N_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured. `spec`: of every run, but for its load, its cache and how answers end."""

    spec: RunSpec
    caches: tuple[Cache, ...]
    loads: Loads


def wish_of(flags: RunFlags) -> Wish:
    """Return what the flags ask for. Raises UsageError naming the flag at fault."""
    named, caches = split_cache(flags.workload)
    workload = parse_workload(named)
    loads = parse_loads(flags.concurrency, flags.rate, is_trace=workload.is_trace)
    duration_s = None if flags.duration is None else _seconds(flags.duration)
    n_requests = flags.requests
    if n_requests is None and duration_s is None and not workload.is_trace:
        n_requests = N_REQUESTS
    spec = RunSpec(
        workload=workload,
        load=loads.fixed[0] if loads.fixed else Load(concurrency=1),
        n_requests=n_requests,
        duration_s=duration_s,
        n_warmup=flags.warmup,
        seed=flags.seed,
        slo=None if flags.slo is None else parse_slo(flags.slo),
    )
    return Wish(spec, caches or loads.caches(), loads)


def _seconds(text: str) -> float:
    seconds = parse_duration("--duration", text)
    if not seconds:
        raise UsageError("--duration takes a time that ends, above 0.", "--duration 60")
    return seconds
