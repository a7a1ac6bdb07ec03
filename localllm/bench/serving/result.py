"""What one run found: every counted request, and what the run cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.client.calls import Outcome
from localllm.bench.machine.resources import Resources
from localllm.bench.serving.spec import Api, RunSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """One counted request. `kind` and `max_tokens` of its ask; `is_valid`: under its schema, None without one.

    `output_tokens`: counted from `usage`, else as the run's `token_source` says.
    """

    outcome: Outcome
    kind: str
    max_tokens: int
    output_tokens: int
    is_valid: bool | None = None

    @property
    def is_over_limit(self) -> bool:
        """Whether the server gave more tokens than it was allowed."""
        return self.output_tokens > self.max_tokens


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run on one endpoint.

    `began_at`: UTC, ISO 8601. `client_cpu_s`: CPU time of this process while it ran, but
    for that of watching the server. `token_source`:
    "usage", "server tokenizer", "local tokenizer" or "pieces". `unsupported`: why the endpoint
    cannot do this workload; nothing is counted then. `partial`: it was ended early. `ready_s`: from the
    server's last start until it answered, where it was started here.
    """

    spec: RunSpec
    api: Api
    model: str
    samples: tuple[Sample, ...]
    began_at: str
    duration_s: float
    client_cpu_s: float = 0.0
    n_warmed_up: int = 0
    token_source: str = "usage"
    resources: Resources = field(default_factory=Resources)
    unsupported: str = ""
    partial: bool = False
    notes: tuple[str, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)
    ready_s: float | None = None
