"""What one run is: which workload, at which load, after what was cached, counted how."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from localllm.bench.slo import Slo
from localllm.bench.workloads.ask import Workload

Api: TypeAlias = Literal["openai-chat", "openai-completions"]


class Cache(Enum):
    """What the server may hold when a request comes.

    COLD: each request begins with text of its own, so nothing was computed before. WARM: what a
    session begins with was sent before, its own end was not; later turns find what earlier ones left.
    RESTART: what every request begins with was sent before, then the server was stopped and started.
    """

    COLD = "cold"
    WARM = "warm"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: `concurrency` clients one request after another, or `rate_per_s` arrivals a second.

    `shape`: of the gamma distribution of the times between arrivals; 1 = Poisson, below 1 burstier.
    Neither set: at the recorded times of a trace.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    shape: float = 1.0

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        if self.rate_per_s is None:
            return "as recorded"
        return f"rate {self.rate_per_s:g}/s" + (f", gamma {self.shape:g}" if self.shape != 1 else "")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run. It ends after `n_requests` or when `duration_s` passed, whichever is first; one of them is set.

    `fills_length`: the server is told to go on to `max_tokens` where an ask is free text.
    """

    workload: Workload
    load: Load
    cache: Cache = Cache.COLD
    n_requests: int | None = 32
    duration_s: float | None = None
    n_warmup: int = 2
    seed: int = 1
    slo: Slo | None = None
    fills_length: bool = False
