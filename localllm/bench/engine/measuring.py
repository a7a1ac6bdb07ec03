"""Measures a loaded model in process: llama-bench's rows, and our decode against a bare loop.

Everything of ours goes through `Service.submit`: what is measured is what a user gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.rows import Case, EngineFacts, Row, ratio_fields
from localllm.bench.engine.watch import N_TRIES, NeverTogether, Prompts, pace_s, watch
from localllm.bench.stats.summaries import mean, paired_ratio
from localllm.runtime.service import Service

SLACK_TOKENS = 8
"""Tokens more than are counted, for sequences that begin to decode some steps apart."""


class Bare(Protocol):
    """The loop that one would write over the C API: decode, take the best logit, go on."""

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> float:
        """Prefill the prompts on an empty cache, then return the seconds that `n_steps` steps took."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each kind is measured. The defaults are llama-bench's where it has one."""

    n_prompt: int = 512
    n_gen: int = 128
    n_depth: int = 512
    n_reps: int = 5
    n_parallel: int = 4
    n_gen_parallel: int = 32
    overhead_depth: int = 64
    overhead_gen: int = 48
    overhead_pairs: int = 12
    overhead_depth_parallel: int = 32
    overhead_gen_parallel: int = 24
    overhead_pairs_parallel: int = 8

    @property
    def prefill(self) -> Case:
        """Prompt processing on an empty cache."""
        return Case(n_prompt=self.n_prompt)

    @property
    def decode(self) -> Case:
        """Generation from a prompt of one token."""
        return Case(n_gen=self.n_gen)

    @property
    def deep(self) -> Case:
        """Prompt processing behind a prefix that is held."""
        return Case(n_prompt=self.n_prompt, n_depth=self.n_depth)

    @property
    def parallel(self) -> Case:
        """Generation by several sequences at once."""
        return Case(n_gen=self.n_gen_parallel, n_parallel=self.n_parallel)

    @property
    def overhead(self) -> Case:
        """Generation against the bare loop."""
        return Case(n_gen=self.overhead_gen, n_depth=self.overhead_depth)

    @property
    def overhead_parallel(self) -> Case:
        """Generation by several sequences against a bare loop of as many rows."""
        return Case(n_gen=self.overhead_gen_parallel, n_depth=self.overhead_depth_parallel, n_parallel=self.n_parallel)


def context_tokens(case: Case) -> int:
    """Return the cells that a case fills at most, over all its sequences."""
    return (case.n_prompt + case.n_gen + case.n_depth + SLACK_TOKENS) * case.n_parallel


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded service, what its rows say of it, and where its prompts come from."""

    service: Service
    facts: EngineFacts
    prompts: Prompts

    def once(self, n_prompt: int, n_gen: int, n_parallel: int = 1) -> None:
        """Run something that is not counted: the warm-up."""
        watch(self.service, [self.prompts.draw(n_prompt) for _ in range(n_parallel)], n_gen)


def measure_prefill(subject: Subject, case: Case, n_reps: int, recorder: Recorder) -> None:
    """Record the time from a prompt to its first token."""

    def once() -> float:
        return watch(subject.service, [subject.prompts.draw(case.n_prompt)], 1)[0].first_token_s

    subject.once(case.n_prompt, 1)
    recorder.repeat(case.name, n_reps, once, rate_row(subject.facts, case))


def measure_decode(
    subject: Subject, case: Case, n_reps: int, recorder: Recorder, extras: Callable[[float], Mapping[str, Any]]
) -> None:
    """Record the time of `n_gen` steps of one row, from an empty cache on; `extras(t/s)` go into the row."""

    def once() -> float:
        return watch(subject.service, [subject.prompts.draw(1)], case.n_gen)[0].total_s

    subject.once(1, 1)
    recorder.repeat(case.name, n_reps, once, rate_row(subject.facts, case, extras))


def measure_deep(subject: Subject, case: Case, n_reps: int, recorder: Recorder) -> None:
    """Record the time from a prompt to its first token where its first `n_depth` tokens are held.

    The prefix alone is submitted before each repetition, so that nothing else is held then. A
    model whose state cannot be cut there computes more: the row is left out, with a note.
    """
    prefix = subject.prompts.draw(case.n_depth)
    subject.once(case.n_prompt, 1)

    def once() -> float:
        watch(subject.service, [prefix], 1)
        found = watch(subject.service, [prefix + subject.prompts.draw(case.n_prompt)], 1)[0]
        n_computed = found.prompt_tokens - found.cached_tokens
        if n_computed > case.n_prompt + SLACK_TOKENS:
            raise NotHeld(n_computed)
        return found.first_token_s

    try:
        recorder.repeat(case.name, n_reps, once, rate_row(subject.facts, case))
    except NotHeld as error:
        recorder.notes.append(f"{case.name}: the prefix is not held by this model, {error} tokens were computed")


class NotHeld(Exception):
    """A prefix that was to be held was computed again."""


def measure_parallel(subject: Subject, case: Case, n_reps: int, recorder: Recorder) -> None:
    """Record the time of `n_gen` steps in which `n_parallel` sequences decode together."""

    def once() -> float:
        prompts = [subject.prompts.draw(1) for _ in range(case.n_parallel)]
        return case.n_gen * pace_s(subject.service, prompts, case.n_gen + SLACK_TOKENS)

    subject.once(1, 2, case.n_parallel)
    with _noted(case, recorder):
        recorder.repeat(case.name, n_reps, once, rate_row(subject.facts, case))


def measure_overhead(subject: Subject, bare: Bare, case: Case, n_pairs: int, recorder: Recorder) -> None:
    """Record our steps against the bare loop's, taken in turn: the same prompts, counts and positions.

    The side that goes first changes from pair to pair. Prefill is not counted on either side.
    """
    turn = 0

    def ours(prompts: list[tuple[int, ...]]) -> float:
        return pace_s(subject.service, prompts, case.n_gen + SLACK_TOKENS)

    def theirs(prompts: list[tuple[int, ...]]) -> float:
        n_steps = case.n_gen + SLACK_TOKENS - 1
        return bare.decode(prompts, n_steps) / n_steps

    def once() -> tuple[float, float]:
        nonlocal turn
        turn += 1
        prompts = [subject.prompts.draw(case.n_depth) for _ in range(case.n_parallel)]
        if turn % 2:
            first = ours(prompts)
            return first, theirs(prompts)
        second = theirs(prompts)
        return ours(prompts), second

    with _noted(case, recorder):
        once()
        name = f"{case.name} against the bare loop"
        recorder.repeat(name, n_pairs, once, overhead_row(subject.facts, case))


@contextmanager
def _noted(case: Case, recorder: Recorder) -> Iterator[None]:
    """Leave the row out, with a note, where its sequences never decode together."""
    try:
        yield
    except NeverTogether:
        recorder.notes.append(f"{case.name}: in {N_TRIES} tries the sequences never decoded together")


def rate_row(
    facts: EngineFacts, case: Case, extras: Callable[[float], Mapping[str, Any]] = lambda rate: {}
) -> Callable[[list[float], bool], Row]:
    when = now_text()

    def row(samples_s: list[float], partial: bool) -> Row:
        samples_ns = tuple(round(1e9 * s) for s in samples_s)
        rate = mean([case.n_tokens / s for s in samples_s])
        return Row(case, facts, when, samples_ns, partial, extras=extras(rate))

    return row


def overhead_row(facts: EngineFacts, case: Case) -> Callable[[list[tuple[float, float]], bool], Row]:
    when = now_text()

    def row(pairs: list[tuple[float, float]], partial: bool) -> Row:
        ours_s, bare_s = [case.n_gen * ours for ours, _ in pairs], [case.n_gen * bare for _, bare in pairs]
        extras = {
            "bare_avg_ns": round(1e9 * mean(bare_s)),
            "bare_avg_ts": mean([case.n_tokens / s for s in bare_s]),
            **ratio_fields("overhead_ratio", paired_ratio(bare_s, ours_s)),  # of speeds: above 1 = we are faster
        }
        return Row(case, facts, when, tuple(round(1e9 * s) for s in ours_s), partial, extras=extras)

    return row


def now_text() -> str:
    """Return the time as llama-bench writes it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
