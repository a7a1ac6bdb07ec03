"""`fim`: an editor asks for what belongs at the cursor, the cursor moving down one file."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import count, spread, tokens, words
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing
from localllm.bench.workloads.source import write_source

_LEAST_CHARS = 8  # of a line that a cursor may stand in
_STEP_WORDS = 12  # at least between two cursors: two or three lines
_MEAN_STEP_WORDS = 16
_MOST_STEP_WORDS = 40  # and at most: a line more, and those that are too short
_MOST_FUNCTION_WORDS = 100  # by which a source may be shorter than was wished


@dataclass(frozen=True, slots=True)
class FimParameters:
    """How much stands around the cursor, and how often it is asked."""

    before: int = words(150, "text before the first cursor of a file (what white space separates)")
    after: int = words(60, "text behind the cursor")
    cursors: int = count(3, 1, 1_000, "requests of one session, in one file from above to below")
    answer: int = tokens(24, "an answer")
    spread: float = spread(0.3)


@dataclass(frozen=True, slots=True)
class Hole:
    """A place in a file: the text before the cursor, what belongs there (up to the line's end), what follows."""

    before: str
    middle: str
    after: str


def _sessions(of: FimParameters, seed: int) -> Iterator[Session]:
    lengths = _lengths(of)
    at = 0
    while True:
        draws = Draws(seed, "fim", at)
        yield tuple(
            Ask("fim", lengths["answer"].draw(draws), prompt=hole.before, suffix=hole.after)
            for hole in holes(draws, lengths["before"].draw(draws), lengths["after"].draw(draws), of.cursors)
        )
        at += 1


def holes(draws: Draws, n_before: int, n_after: int, n_holes: int) -> list[Hole]:
    """Return places in one file, each below the one before it, the first behind about `n_before` words."""
    lines = write_source(draws, n_before + n_after + n_holes * _MOST_STEP_WORDS + _MOST_FUNCTION_WORDS).text.splitlines(
        keepends=True
    )
    n_until = [0, *accumulate(len(line.split()) for line in lines)]
    at = bisect.bisect_left(n_until, n_before)
    found: list[Hole] = []
    for _ in range(n_holes):
        at = _next_line(lines, at)
        indent = len(lines[at]) - len(lines[at].lstrip())
        cut = indent + draws.between(2, max(2, (len(lines[at].rstrip()) - indent) // 2))
        end = bisect.bisect_left(n_until, n_until[at + 1] + n_after)
        found.append(
            Hole("".join(lines[:at]) + lines[at][:cut], lines[at][cut:-1], "\n" + "".join(lines[at + 1 : end]))
        )
        at = bisect.bisect_left(n_until, n_until[at] + _STEP_WORDS)
    return found


def _next_line(lines: list[str], at: int) -> int:
    """Return the first line from `at` on that is long enough to be completed."""
    while len(lines[at].strip()) < _LEAST_CHARS:
        at += 1
    return at


def _lengths(of: FimParameters) -> Mapping[str, Lengths]:
    return {
        "before": Lengths(of.before, of.spread),
        "after": Lengths(of.after, of.spread),
        "answer": Lengths(of.answer, of.spread, "tokens"),
    }


def _sharing(of: FimParameters) -> Sharing:
    lengths = _lengths(of)
    prompts = [lengths["before"].mean + at * _MEAN_STEP_WORDS for at in range(of.cursors)]
    whole = sum(prompts) + of.cursors * lengths["after"].mean
    part = Shared("the file up to the line of the cursor", "the later requests of a session", "1 a session")
    return Sharing((part,), sum(prompts[:-1]) / whole, sum(prompts) / whole)


FIM = Recipe(
    name="fim",
    effect="code to fill in at a cursor, with the text before and behind it",
    parameters=FimParameters,
    sessions=_sessions,
    n_asks=lambda of: of.cursors,
    lengths=_lengths,
    sharing=_sharing,
)
