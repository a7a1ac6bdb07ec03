"""Sums up one run: latencies at their percentiles, throughput, goodput, errors, caches, drafts, memory, energy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.latencies import Distribution, distribution, latencies_ms
from localllm.bench.measures import LATENCIES, measure
from localllm.bench.serving.result import RunResult, Sample
from localllm.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run came to. Requests that our own stop cancelled are counted nowhere but in `n_cancelled`.

    `duration_s`: from when the first request was due to the last end. Tokens and latencies are of
    proper answers alone. None = not told: `prompt_tokens` unless every answer tells them,
    `cached_tokens` and `drafted_tokens` where no answer tells any. `latencies`: by the names of
    measures.LATENCIES; a name is missing where nothing was measured.
    `max_output_tokens_per_s`: in the best of the seconds counted from the first request; a piece
    counts its answer's tokens / pieces. `max_concurrent_requests`: answers under way at one moment.
    """

    duration_s: float
    n_requests: int
    n_answers: int
    n_cancelled: int
    n_by_error: Mapping[str, int]
    n_over_limit: int
    prompt_tokens: int | None
    output_tokens: int
    cached_tokens: int | None
    drafted_tokens: int | None
    accepted_draft_tokens: int | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    client_cpu_ms_per_token: float | None
    latencies: Mapping[str, Distribution]
    scalars: Mapping[str, float | None]

    def value(self, name: str) -> float | None:
        """Return a measure in its own unit (ms, a second, share of 1, bytes, J); None where it was not measured.

        Raises: UsageError where measures.py has no such name.
        """
        of = measure(name)
        if not of.statistic:
            return self.scalars[name]
        found = self.latencies.get(of.base)
        return None if found is None else found.at(of.statistic)


def summarise_run(result: RunResult) -> RunSummary:
    """Return what a run came to."""
    counted = [sample for sample in result.samples if sample.outcome.end is not End.CANCELLED]
    answers = [sample for sample in counted if sample.outcome.end is End.ANSWER]
    errors = Counter(code for sample in counted if (code := sample.outcome.failure_code) is not None)
    duration_s = _duration_s(counted)
    output_tokens = _output_tokens(answers)
    drafted, accepted = _drafts(answers)
    return RunSummary(
        duration_s=duration_s,
        n_requests=len(counted),
        n_answers=len(answers),
        n_cancelled=len(result.samples) - len(counted),
        n_by_error=dict(errors),
        n_over_limit=sum(sample.is_over_limit for sample in answers),
        prompt_tokens=_prompt_tokens(answers),
        output_tokens=output_tokens,
        cached_tokens=_cached(answers)[0],
        drafted_tokens=drafted,
        accepted_draft_tokens=accepted,
        max_output_tokens_per_s=max_tokens_in_a_second(answers),
        max_concurrent_requests=max_concurrent([sample.outcome for sample in answers]),
        client_cpu_ms_per_token=_ratio(1e3 * result.client_cpu_s, output_tokens),
        latencies=_latencies(answers),
        scalars={
            **_of_requests(counted, answers, duration_s, result.spec.slo),
            **_of_tokens(answers, duration_s),
            **_of_machine(result, output_tokens),
        },
    )


def _of_requests(
    counted: Sequence[Sample], answers: Sequence[Sample], duration_s: float, slo: Slo | None
) -> dict[str, float | None]:
    n_good = None if slo is None else sum(is_good(sample, slo) for sample in answers)
    with_schema = [sample.is_valid for sample in answers if sample.is_valid is not None]
    return {
        "error": _ratio(len(counted) - len(answers), len(counted)),
        "goodput": _ratio(n_good, len(counted)),
        "request_goodput": _ratio(n_good, duration_s),
        "request_throughput": _ratio(len(answers), duration_s),
        "valid_share": _ratio(sum(with_schema), len(with_schema)),
    }


def _of_tokens(answers: Sequence[Sample], duration_s: float) -> dict[str, float | None]:
    prompt_tokens, output_tokens = _prompt_tokens(answers), _output_tokens(answers)
    total_tokens = None if prompt_tokens is None else prompt_tokens + output_tokens
    drafted, accepted = _drafts(answers)
    return {
        "output_throughput": _ratio(output_tokens, duration_s),
        "total_token_throughput": _ratio(total_tokens, duration_s),
        "cached_share": _ratio(*_cached(answers)),
        "accepted_share": _ratio(accepted, drafted),
    }


def _of_machine(result: RunResult, output_tokens: int) -> dict[str, float | None]:
    return {
        "peak_memory": result.resources.peak_memory_bytes,
        "joules_per_token": _ratio(result.resources.joules, output_tokens),
        "ready": None if result.ready_s is None else 1e3 * result.ready_s,
    }


def is_good(sample: Sample, slo: Slo) -> bool:
    """Say whether one request kept the objective: a proper answer, each latency that is limited within its limit.

    For a limit on itl the request's own gaps are taken at the limit's own statistic. An answer of one
    piece has no pace and keeps limits on it; any other latency that was not measured is not within.
    """
    if sample.outcome.end is not End.ANSWER:
        return False
    found = latencies_ms(sample.outcome, sample.output_tokens)
    for limit in slo.limits:
        if limit.measure.base == "itl":
            gaps = distribution(found["itl"])
            if gaps is not None and not limit.holds(gaps.at(limit.measure.statistic)):
                return False
    bounds = slo.request_bounds_ms()
    return all(_is_within(name, found[name], bound) for name, bound in bounds.items() if name != "itl")


def _is_within(name: str, values: Sequence[float], bound_ms: float) -> bool:
    return values[0] <= bound_ms if values else name == "tpot"


def max_tokens_in_a_second(answers: Iterable[Sample]) -> float:
    """Return the most output tokens in one of the seconds counted from when the first answer's request was sent.

    As vLLM's serving benchmark counts them, only that a piece of several tokens counts as several.
    """
    found = [(s.outcome, s.output_tokens / len(s.outcome.token_s)) for s in answers if s.outcome.token_s]
    if not found:
        return 0.0
    begun_s = min(outcome.started_s for outcome, _ in found)
    seconds = np.concatenate([np.asarray(outcome.token_s) - begun_s for outcome, _ in found]).astype(np.int64)
    weights = np.concatenate([np.full(len(outcome.token_s), tokens) for outcome, tokens in found])
    return float(np.bincount(np.maximum(seconds, 0), weights=weights).max())


def max_concurrent(answers: Iterable[Outcome]) -> int:
    """Return how many of these were under way at one moment, each from when it was sent to just before its end."""
    steps = [(outcome.started_s, 1) for outcome in answers]
    steps += [(outcome.ended_s, -1) for outcome in answers]
    level = most = 0
    for _, step in sorted(steps):  # of the same moment, ends come first
        level += step
        most = max(most, level)
    return most


def _duration_s(counted: Sequence[Sample]) -> float:
    if not counted:
        return 0.0
    return max(s.outcome.ended_s for s in counted) - min(s.outcome.due_s for s in counted)


def _latencies(answers: Iterable[Sample]) -> dict[str, Distribution]:
    samples: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for sample in answers:
        for name, values in latencies_ms(sample.outcome, sample.output_tokens).items():
            samples[name] += values
    return {name: found for name, values in samples.items() if (found := distribution(values)) is not None}


def _output_tokens(answers: Iterable[Sample]) -> int:
    return sum(sample.output_tokens for sample in answers)


def _prompt_tokens(answers: Iterable[Sample]) -> int | None:
    """Return the sum over answers; None where one does not tell, or there is none."""
    told = [sample.outcome.prompt_tokens for sample in answers]
    known = [n for n in told if n is not None]
    return sum(known) if known and len(known) == len(told) else None


def _cached(answers: Iterable[Sample]) -> tuple[int | None, int]:
    """Return the cached tokens told and the prompt tokens they are a part of; None where no answer tells.

    Where some tell, an answer that does not had none: servers leave a zero away.
    """
    told = [s.outcome for s in answers if s.outcome.prompt_tokens is not None]
    cached = [outcome.cached_tokens for outcome in told if outcome.cached_tokens is not None]
    return (sum(cached) if cached else None), sum(outcome.prompt_tokens or 0 for outcome in told)


def _drafts(answers: Iterable[Sample]) -> tuple[int | None, int | None]:
    """Return the tokens drafted and those of them accepted; None where no answer tells."""
    told = [
        (outcome.accepted_draft_tokens, outcome.rejected_draft_tokens or 0)
        for outcome in (sample.outcome for sample in answers)
        if outcome.accepted_draft_tokens is not None
    ]
    if not told:
        return None, None
    accepted = sum(n for n, _ in told)
    return accepted + sum(n for _, n in told), accepted


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
