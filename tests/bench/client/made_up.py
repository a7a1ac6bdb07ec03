"""Outcomes, samples and runs as if measured, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from localllm.bench.client.calls import End, Outcome
from localllm.bench.serving.result import RunResult, Sample
from localllm.bench.serving.spec import Load, RunSpec
from localllm.bench.workloads.ask import Session


@dataclass(frozen=True, slots=True)
class MadeUpWorkload:
    """A workload of which only the name is needed."""

    spec: str = "chat"
    facts: Mapping[str, Any] = field(default_factory=lambda: {"prompt_words": "20 to 90", "shared": "the turns before"})
    is_trace: bool = False

    def sessions(self, seed: int) -> Iterator[Session]:
        raise AssertionError("not asked for")


def outcome(end: End = End.ANSWER, **fields: Any) -> Outcome:
    known: dict[str, Any] = {
        "label": "",
        "client": 0,
        "is_stream": True,
        "status": 200,
        "due_s": 10.0,
        "started_s": 10.25,
        "ended_s": 12.0,
    }
    return Outcome(end=end, **(known | fields))


def sample(of: Outcome, output_tokens: int | None = None, **fields: Any) -> Sample:
    counted = output_tokens if output_tokens is not None else (of.completion_tokens or len(of.token_s))
    return Sample(of, **({"kind": "chat", "max_tokens": 64} | fields), output_tokens=counted)


def result(*samples: Sample, **fields: Any) -> RunResult:
    known: dict[str, Any] = {
        "spec": RunSpec(MadeUpWorkload(), Load(concurrency=1)),
        "api": "openai-chat",
        "model": "smollm2:135m",
        "began_at": "2026-03-01T10:20:30+00:00",
        "duration_s": 2.0,
    }
    return RunResult(samples=samples, **(known | fields))


def measured(
    seed: int, n: int = 40, *, pace_ms: float = 20.0, wait_ms: float = 60.0, rate: float = 4.0
) -> list[Sample]:
    """Return `n` answered requests with gamma-distributed waits and paces, arriving at `rate` a second."""
    rng = np.random.default_rng(seed)
    due_s = 100.0
    found = []
    for number in range(n):
        due_s += float(rng.exponential(1 / rate))
        sent_s = due_s + float(rng.exponential(0.0005))
        n_tokens = int(rng.integers(1, 60))
        first_s = sent_s + float(rng.gamma(4, wait_ms / 4e3))
        gaps = rng.gamma(9, pace_ms / 9e3, size=n_tokens - 1)
        token_s = tuple(float(x) for x in first_s + np.concatenate([[0.0], np.cumsum(gaps)]))
        found.append(
            sample(
                outcome(
                    client=number % 4,
                    due_s=due_s,
                    started_s=sent_s,
                    token_s=token_s,
                    answer_s=token_s[min(2, n_tokens - 1)],
                    ended_s=token_s[-1] + 0.001,
                    prompt_tokens=int(rng.integers(30, 300)),
                    cached_tokens=int(rng.integers(0, 30)),
                    completion_tokens=n_tokens,
                    timings={"queue_ms": float(rng.exponential(5))},
                )
            )
        )
    return found
