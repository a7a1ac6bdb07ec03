"""Compares two files of results: every measure of every cell that both have, and what to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from localllm.bench.compare.cell import Cell, Origin, measure_named
from localllm.bench.compare.change import Change, changed
from localllm.bench.compare.pairing import Pair, caveats, obstacles, paired
from localllm.bench.measures import LATENCIES, SCALARS, Measure, measure
from localllm.bench.stats import summaries
from localllm.errors import UsageError

ALPHA = 0.05
_FEWEST_FOR_P95 = 20


class Verdict(Enum):
    """What is said of a change."""

    BETTER = "better"
    WORSE = "worse"
    NOT_SHOWN = "no difference shown"
    NOT_TESTED = "one value each"


@dataclass(frozen=True, slots=True)
class Line:
    """One measure of one cell. `p_adjusted`: p among all lines of the comparison; None where there is no p."""

    change: Change
    p_adjusted: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CellComparison:
    """Two cells and their lines. `notes`: what to know of this pair alone."""

    name: str
    a: Cell
    b: Cell
    lines: tuple[Line, ...]

    def line(self, of: Measure) -> Line | None:
        """Return the line of a measure."""
        return next((line for line in self.lines if line.change.measure.name == of.name), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two files say of each other. `warnings`: why they are not comparable (`force`).

    `notes`: what differs that may differ, and what has nothing to be compared with.
    """

    a: Origin
    b: Origin
    cells: tuple[CellComparison, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def compare(a: Sequence[Cell], b: Sequence[Cell], *, force: bool = False, also: Sequence[str] = ()) -> Comparison:
    """Compare the cells of two files; `also`: measures beyond the usual ones, by name.

    Raises UsageError where they are not comparable (unless `force`), have nothing in common, or where
    neither has a measure of `also`.
    """
    found = paired(a, b)
    if not found.pairs:
        raise _nothing_common(a, b)
    named = [measure_named(name, [*a, *b]) for name in also]
    for of in named:
        if not any(cell.has(of) for cell in (*a, *b)):
            raise UsageError(f"neither file has {of.name}.", _measures_hint(a, b))
    warnings = _once((pair.name, list(obstacles(pair.a, pair.b))) for pair in found.pairs)
    if warnings and not force:
        raise UsageError(
            "These results are not comparable. " + " ".join(f"{_sentence(line)}" for line in warnings),
            "--force compares them all the same, and says so",
        )
    changes = [(pair, list(_changes(pair, named))) for pair in found.pairs]
    if not any(lines for _, lines in changes):
        raise _nothing_common(a, b)
    notes = (*_once((pair.name, list(caveats(pair.a, pair.b))) for pair in found.pairs), *found.notes)
    return Comparison(a[0].origin, b[0].origin, tuple(_judged(changes)), warnings, notes)


def _changes(pair: Pair, also: Sequence[Measure]) -> Iterator[Change]:
    seen: set[str] = set()
    for of in (*_usual(pair), *also):
        if of.name not in seen and (found := changed(of, pair.a, pair.b)) is not None:
            seen.add(of.name)
            yield found


def _usual(pair: Pair) -> Iterator[Measure]:
    """Yield what is always compared: tests; of latencies the median, and p95 of enough requests; the rest."""
    yield from pair.a.tests.values()
    if pair.a.tests:
        return
    for base in LATENCIES:
        if base == "answer_ttft" and all(_never_thinks(cell) for cell in (pair.a, pair.b)):
            continue
        yield measure(f"{base}_p50")
        counts = [sum(map(bool, each)) for cell in (pair.a, pair.b) for each in [_requests(cell, base)]]
        if min(counts) >= _FEWEST_FOR_P95 or not all(counts):
            yield measure(f"{base}_p95")
        if not all(counts):
            yield measure(f"{base}_p99")
    yield from map(measure, SCALARS)


def _never_thinks(cell: Cell) -> bool:
    """Say whether the answer's first token is the first of all: it would be compared twice."""
    return cell.samples.get("answer_ttft", ()) == cell.samples.get("ttft", ())


def _requests(cell: Cell, base: str) -> list[tuple[float, ...]]:
    return [request for each in cell.samples.get(base, ()) for request in each]


def _judged(changes: Sequence[tuple[Pair, list[Change]]]) -> Iterator[CellComparison]:
    """Yield the lines with their verdicts; each p counts among all of them, so that more lines mean no more alarms."""
    tested = [change.p for _, found in changes for change in found if change.p is not None]
    adjusted = iter(summaries.adjusted(tested))
    for pair, found in changes:
        lines = []
        for change in found:
            p = None if change.p is None else next(adjusted)
            lines.append(Line(change, p, _verdict(change, p)))
        yield CellComparison(pair.name, pair.a, pair.b, tuple(lines))


def _verdict(change: Change, p_adjusted: float | None) -> Verdict:
    if p_adjusted is None:
        return Verdict.NOT_TESTED
    is_shown = p_adjusted < ALPHA
    if change.is_gated and change.p_ranks is not None:
        is_shown = is_shown and change.p_ranks < ALPHA
    if not is_shown or change.change == 0:
        return Verdict.NOT_SHOWN
    return Verdict.BETTER if (change.change < 0) == change.measure.lower_is_better else Verdict.WORSE


def _once(found: Iterator[tuple[str, list[str]]] | Sequence[tuple[str, list[str]]]) -> tuple[str, ...]:
    """Return each sentence once; that of some pairs alone with their names."""
    pairs = list(found)
    names: dict[str, list[str]] = {}
    for name, sentences in pairs:
        for sentence in dict.fromkeys(sentences):
            names.setdefault(sentence, []).append(name)
    return tuple(
        sentence if len(where) == len(pairs) else f"{'; '.join(where)}: {sentence}" for sentence, where in names.items()
    )


def _nothing_common(a: Sequence[Cell], b: Sequence[Cell]) -> UsageError:
    names = ["; ".join(dict.fromkeys(cell.name for cell in cells))[:500] for cells in (a, b)]
    message = f"The files have nothing in common. A: {names[0]}. B: {names[1]}."
    return UsageError(message, "localllm bench compare --help")


def _measures_hint(a: Sequence[Cell], b: Sequence[Cell]) -> str:
    names: list[str] = []
    for cell in (*a, *b):
        latencies = [f"{base}_p95" for base in cell.samples if base in LATENCIES]
        names += [*cell.tests, *latencies, *(name for name in cell.values if name in SCALARS)]
    return "they have " + ", ".join(dict.fromkeys(names))


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")
