"""Sums up requests one by one, so that a run of hours need not keep its outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.latencies import Distribution, distribution, latencies_ms
from localllm.bench.measures import LATENCIES


@dataclass(frozen=True, slots=True)
class Summary:
    """What requests came to, whatever their ends.

    `n_by_end` names every end; `n_by_error` the codes behind refusals and error events. Tokens are
    those of all requests, also of cut ones. `latencies`: by the names of measures.LATENCIES, of
    answers alone; a name is missing where nothing was measured.
    """

    duration_s: float
    n_requests: int
    n_by_end: Mapping[str, int]
    n_by_error: Mapping[str, int]
    faults: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    latencies: Mapping[str, Distribution]


@dataclass(slots=True)
class Tally:
    """Collects a run's figures request by request.

    One owner. Memory: some bytes a token for the times between pieces, less for the rest.
    """

    _n: int = 0
    _begin_s: float | None = None
    _end_s: float = 0.0
    _ends: Counter[str] = field(default_factory=Counter)
    _errors: Counter[str] = field(default_factory=Counter)
    _faults: Counter[str] = field(default_factory=Counter)
    _tokens: Counter[str] = field(default_factory=Counter)
    _samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LATENCIES})

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._n += 1
        begin_s = outcome.due_s if self._begin_s is None else min(self._begin_s, outcome.due_s)
        self._begin_s, self._end_s = begin_s, max(self._end_s, outcome.ended_s)
        self._ends[outcome.end.value] += 1
        if (code := outcome.failure_code) is not None:
            self._errors[code] += 1
        if outcome.fault:
            self._faults[outcome.fault] += 1
        self._tokens["prompt"] += outcome.prompt_tokens or 0
        self._tokens["cached"] += outcome.cached_tokens or 0
        self._tokens["completion"] += outcome.output_tokens
        if outcome.end is End.ANSWER:
            for name, values in latencies_ms(outcome).items():
                self._samples[name] += values

    def summary(self) -> Summary:
        """Return what it came to so far. The duration is from the first request due to the last end."""
        duration_s = self._end_s - self._begin_s if self._begin_s is not None else 0.0
        return Summary(
            duration_s=duration_s,
            n_requests=self._n,
            n_by_end=dict(self._ends),
            n_by_error=dict(self._errors),
            faults=dict(self._faults),
            prompt_tokens=self._tokens["prompt"],
            completion_tokens=self._tokens["completion"],
            cached_tokens=self._tokens["cached"],
            output_tokens_per_s=self._tokens["completion"] / duration_s if duration_s else 0.0,
            latencies={n: found for n, values in self._samples.items() if (found := distribution(values)) is not None},
        )
