"""Turns the outcomes of a run into its samples, after it: tokens counted, answers judged, oddities in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.bench.client.calls import End, Outcome
from localllm.bench.serving.endpoint import Endpoint, TokenCount, count_tokens
from localllm.bench.serving.failures import failure_of
from localllm.bench.serving.result import Sample
from localllm.bench.serving.wire import is_valid
from localllm.bench.workloads.ask import Ask

USAGE, PIECES = "usage", "pieces"
LATE_S = 0.02
LATE_SHARE = 0.05
TOO_FEW = 0.5
"""Tokens a piece of text, on the whole: less, and `usage` does not count what was sent."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The samples of a run. `token_source`: how the tokens of those were counted that came without usage."""

    samples: tuple[Sample, ...]
    token_source: str
    notes: tuple[str, ...]


async def count(endpoint: Endpoint, asks: Sequence[Ask], outcomes: Sequence[Outcome]) -> Counted:
    """Return the samples of `outcomes`, whose labels are places in `asks`."""
    token_source, n_without = USAGE, 0
    samples: list[Sample] = []
    for outcome in outcomes:
        ask = asks[int(outcome.label)]
        n_tokens = outcome.completion_tokens
        if n_tokens is None:
            counted = await _counted(endpoint, outcome) if token_source != PIECES else None
            n_tokens = len(outcome.token_s) if counted is None else counted.n_tokens
            if outcome.end is End.ANSWER and outcome.token_s:  # an empty answer says nothing of who can count
                n_without += 1
                token_source = PIECES if counted is None else counted.source
        valid = is_valid(ask, outcome.text) if outcome.end is End.ANSWER else None
        samples.append(Sample(outcome, ask.kind, ask.max_tokens, n_tokens, valid))
    notes = tuple(_notes(samples, n_without, token_source))
    return Counted(tuple(samples), token_source, notes)


async def _counted(endpoint: Endpoint, outcome: Outcome) -> TokenCount | None:
    if outcome.end is not End.ANSWER or not outcome.text:
        return None
    return await count_tokens(endpoint, outcome.text)


def _notes(samples: Sequence[Sample], n_without: int, token_source: str) -> Iterator[str]:
    n = len(samples)
    if n_without:
        yield f"{n_without} of {n} answers came without usage; {_HOW[token_source]}"
    n_over = sum(sample.is_over_limit for sample in samples if sample.outcome.end is End.ANSWER)
    if n_over:
        yield f"{n_over} of {n} answers are longer than their max_tokens: the server does not keep it"
    yield from _lateness([sample.outcome for sample in samples])
    yield from _oddities([sample.outcome for sample in samples if sample.outcome.end is End.ANSWER])
    failures: dict[End, list[Outcome]] = {}
    for sample in samples:
        if sample.outcome.end is not End.ANSWER:
            failures.setdefault(sample.outcome.end, []).append(sample.outcome)
    for end, some in failures.items():
        (commonest, _), *_ = Counter(failure_of(outcome) for outcome in some).most_common(1)
        yield f"{len(some)} of {n} requests {_BECAME[end]}: {commonest}"


def _lateness(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Tell of a rate that this client could not keep: the wait is in the latencies, but is not the server's."""
    late_s = sorted(outcome.started_s - outcome.due_s for outcome in outcomes)
    n_late = sum(each_s > LATE_S for each_s in late_s)
    if n_late > LATE_SHARE * len(late_s):
        most_ms = 1e3 * late_s[-1]
        told = f"{n_late} of {len(late_s)} requests were sent later than they were due, by up to {most_ms:.0f} ms"
        yield f"{told}: this client could not keep the rate, and their latencies hold that wait"


def _oddities(answers: Sequence[Outcome]) -> Iterator[str]:
    n, n_whole = len(answers), sum(not outcome.is_stream for outcome in answers)
    if n_whole:
        yield f"{n_whole} of {n} answers came whole, not as a stream: they have no times but that of their end"
    counted = [(one.completion_tokens, len(one.token_s)) for one in answers]
    n_too_few = sum(n_tokens is not None and n_tokens < TOO_FEW * n_pieces for n_tokens, n_pieces in counted)
    if n_too_few:
        yield f"{n_too_few} of {n} answers came in far more pieces than their usage says they have tokens"


_HOW = {
    "server tokenizer": "their tokens are those that the server's /tokenize counts in their text",
    "local tokenizer": "their tokens are those that the model's own file counts in their text",
    PIECES: "their pieces of text are counted as tokens",
}
_BECAME = {
    End.REFUSED: "were refused",
    End.ERROR_EVENT: "ended in an error",
    End.LOST: "were lost",
    End.MALFORMED: "got an answer that breaks the rules",
    End.TIMED_OUT: "timed out",
    End.UNREACHABLE: "reached no server",
    End.CANCELLED: "were cancelled",
}
