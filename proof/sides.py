"""What is compared: a server over HTTP, the engine in this process, and a bare loop over the C API.

Each answers the same prompts of token ids, greedily, with as many tokens, all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.latencies import tpot_ms, ttft_ms
from localllm.bench.client.load import closed_loop
from localllm.bench.engine.watch import watch
from localllm.runtime.service import Service
from proof.processes import cpu_s

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of some prompts that were sent at once.

    `total_s`: from the first sent to the last token. `pace_ms`: per token after an answer's first,
    the mean over answers. `cpu_s`: of the HTTP process, where there is one that is ours.
    `outside_ms`: of the times to a first token, the part that the engine says it did not spend.
    """

    n_tokens: int
    total_s: float
    ttft_ms: tuple[float, ...]
    pace_ms: float
    cpu_s: float | None = None
    outside_ms: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """All tokens over all time, prompts included."""
        return self.n_tokens / self.total_s


class BurstFailed(Exception):
    """A side did not answer as it was asked to."""


class Side(Protocol):
    """One of those that are compared."""

    name: str

    def burst(self, prompts: Prompts, n_gen: int) -> Burst:
        """Answer all prompts at once with `n_gen` tokens each. Raises BurstFailed."""
        ...


@dataclass(slots=True)
class HttpSide:
    """A server. `fields` go into every body; `pid`: its HTTP process, to count its CPU time."""

    name: str
    target: Target
    fields: Mapping[str, Any] = field(default_factory=dict)
    pid: int | None = None

    def call(self, prompt: Sequence[int], n_gen: int, **settings: Any) -> Call:
        """Return the request for one streamed answer."""
        body = {
            "prompt": list(prompt),
            "max_tokens": n_gen,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return Call.of("/v1/completions", body, **settings)

    def burst(self, prompts: Prompts, n_gen: int) -> Burst:
        """Send all prompts at once, each on a connection of its own."""
        outcomes: list[Outcome] = []
        clients = [[self.call(prompt, n_gen)] for prompt in prompts]
        before_s = None if self.pid is None else cpu_s(self.pid)
        asyncio.run(closed_loop(self.target, clients, outcomes.append))
        spent_s = None if self.pid is None or before_s is None else cpu_s(self.pid) - before_s
        return burst_of(self.name, outcomes, n_gen, spent_s)


def burst_of(name: str, outcomes: Sequence[Outcome], n_gen: int, spent_s: float | None) -> Burst:
    """Return what these answers came to. Raises BurstFailed where one is not what was asked for."""
    for outcome in outcomes:
        if outcome.end is not End.ANSWER or not outcome.token_s:
            raise BurstFailed(f"{name}: {outcome.end.value} {outcome.error_message or outcome.fault}")
        if outcome.completion_tokens not in (n_gen, None) or "length" not in outcome.finish_reasons:
            raise BurstFailed(f"{name}: {outcome.completion_tokens} tokens instead of {n_gen}")
    begin_s = min(outcome.started_s for outcome in outcomes)
    paces = [_pace_ms(outcome, n_gen) for outcome in outcomes]
    return Burst(
        n_tokens=n_gen * len(outcomes),
        total_s=max(outcome.token_s[-1] for outcome in outcomes) - begin_s,
        ttft_ms=tuple(ttft_ms(outcome) or 0.0 for outcome in outcomes),
        pace_ms=sum(paces) / len(paces),
        cpu_s=spent_s,
        outside_ms=tuple(found for outcome in outcomes if (found := _outside_ms(outcome)) is not None),
    )


def _outside_ms(outcome: Outcome) -> float | None:
    timings, first_ms = outcome.timings or {}, ttft_ms(outcome)
    if first_ms is None or "queue_ms" not in timings:
        return None
    return first_ms - float(timings["queue_ms"]) - float(timings["prompt_ms"])


def _pace_ms(outcome: Outcome, n_gen: int) -> float:
    if outcome.completion_tokens is None:  # it ended by length: it has as many as were asked for
        return 1e3 * (outcome.token_s[-1] - outcome.token_s[0]) / (n_gen - 1)
    return tpot_ms(outcome) or 0.0


@dataclass(slots=True)
class EngineSide:
    """The same engine in this process, as `localllm bench` drives it."""

    name: str
    service: Service

    def burst(self, prompts: Prompts, n_gen: int) -> Burst:
        """Submit all prompts at once."""
        found = watch(self.service, prompts, n_gen)
        begin_s = min(timeline.submitted_s for timeline in found)
        return Burst(
            n_tokens=sum(len(timeline.token_s) for timeline in found),
            total_s=max(timeline.token_s[-1] for timeline in found) - begin_s,
            ttft_ms=tuple(1e3 * timeline.first_token_s for timeline in found),
            pace_ms=sum(1e3 * t.decode_s / (len(t.token_s) - 1) for t in found) / len(found),
        )


@dataclass(frozen=True, slots=True)
class BareSeconds:
    """What a bare loop took."""

    prefill_s: float
    decode_s: float


@dataclass(slots=True)
class BareSide:
    """A loop over the C API: all prompts prefilled in full batches, then steps of one row each, argmax."""

    name: str
    run: Callable[[Prompts, int], BareSeconds]

    def burst(self, prompts: Prompts, n_gen: int) -> Burst:
        """Run the loop. The prefill gives each answer's first token."""
        took = self.run(prompts, n_gen - 1)
        return Burst(
            n_tokens=n_gen * len(prompts),
            total_s=took.prefill_s + took.decode_s,
            ttft_ms=(1e3 * took.prefill_s,) * len(prompts),
            pace_ms=1e3 * took.decode_s / (n_gen - 1),
        )
