"""Rules that a comparison must keep, as --fail-on writes them: 'ttft_p95>+5%,output_throughput<-3%,error>0.01'."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.bench.compare.cell import Cell, measure_named, shown
from localllm.bench.compare.change import Change, changed
from localllm.bench.compare.comparison import CellComparison, Comparison
from localllm.bench.measures import Kind, Measure, value_of
from localllm.errors import UsageError

EXAMPLE = "--fail-on 'ttft_p95>+5%,output_throughput<-3%,error>0.01'"
_RULE = re.compile(r"\s*([^<>]*?)\s*([<>])\s*([+-]?)\s*([^<>]*?)\s*")
_POINTS = " points"
_MOST_TOLD = 10.0
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Rule:
    """What must not be: a measure of B above (or below) `bound`; its change from A, as a share, where `is_relative`."""

    text: str
    measure: str
    is_above: bool
    bound: str
    is_relative: bool


@dataclass(frozen=True, slots=True)
class Ruling:
    """A rule over one cell. `value` as the rule means it; None where B has none. `why`: what decided, in words."""

    rule: Rule
    cell: str
    has_failed: bool
    value: float | None
    bound: float
    why: str


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of --fail-on. Raises UsageError. Whether there is such a measure shows with the files."""
    rules = []
    for part in text.split(","):
        found = _RULE.fullmatch(part)
        if found is None or not found[1] or not found[4]:
            raise UsageError(f"--fail-on: {part.strip()!r} is no rule.", EXAMPLE)
        name, side, sign, bound = found.groups()
        if sign and not _PERCENT.fullmatch(bound):
            raise UsageError(
                f"--fail-on: {part.strip()!r}: a change is told in percent.",
                f"'{name}{side}{sign}5%', or a value without a sign",
            )
        rules.append(Rule(part.strip(), name, side == ">", sign + bound, bool(sign)))
    return tuple(rules)


def judged(rules: Sequence[Rule], comparison: Comparison, cells: Sequence[Cell]) -> tuple[Ruling, ...]:
    """Return what became of each rule in each cell that has its measure; `cells`: all of both files.

    Raises UsageError where a rule's value has no meaning for its measure, or A has nothing to change from.
    """
    found: list[Ruling] = []
    for rule in rules:
        of = measure_named(rule.measure, list(cells))
        bound = _bound(rule, of)
        rulings = [one for cell in comparison.cells for one in _in_cell(rule, of, bound, cell)]
        if not rulings:
            raise UsageError(f"--fail-on: no cell that both files have tells {of.name}.", EXAMPLE)
        found += rulings
    return tuple(found)


def _bound(rule: Rule, of: Measure) -> float:
    if rule.is_relative:
        return float(rule.bound.replace("%", "").replace(" ", "")) / 100
    try:
        return value_of(of, rule.bound.removesuffix("t/s"))
    except UsageError as error:
        raise UsageError(
            f"--fail-on: {error.message}", f"{error.hint}; a change has a sign: '{rule.measure}>+5%'"
        ) from None


def _in_cell(rule: Rule, of: Measure, bound: float, cell: CellComparison) -> Iterator[Ruling]:
    line = cell.line(of)
    if line is not None:
        judge = _of_change if rule.is_relative else _of_value
        yield judge(rule, bound, cell.name, line.change)
    elif cell.a.has(of):
        yield Ruling(rule, cell.name, True, None, bound, f"B has no {of.name}")
    elif not rule.is_relative and (alone := changed(of, cell.b, cell.b)) is not None:
        yield _of_value(rule, bound, cell.name, alone)
    elif cell.b.has(of):
        raise UsageError(f"--fail-on: A has no {of.name} to compare with ({cell.name}).", EXAMPLE)


def _of_value(rule: Rule, bound: float, cell: str, change: Change) -> Ruling:
    has_failed = change.b > bound if rule.is_above else change.b < bound
    return Ruling(rule, cell, has_failed, change.b, bound, f"{shown(change.measure, change.b)} in B")


def _of_change(rule: Rule, bound: float, cell: str, change: Change) -> Ruling:
    """A change fails where it is beyond the bound, and its interval wholly on that side of none."""
    value = change.relative
    is_beyond = value > bound if rule.is_above else value < bound
    told = f"{100 * value:+.1f}%" if math.isfinite(value) else f"{change_text(change)} from none"
    if change.low is None or change.high is None:
        return Ruling(rule, cell, is_beyond, value, bound, f"{told}; one value each, so there is no interval")
    is_clear = change.low > 0 if rule.is_above else change.high < 0
    interval = interval_text(change)
    if not is_beyond:
        why = f"{told}, within the bound"
    elif is_clear:
        why = f"{told}, and the interval {interval} is clear of none"
    else:
        why = f"{told} is beyond the bound, but the interval {interval} holds none: it may be noise"
    return Ruling(rule, cell, is_beyond and is_clear, value, bound, why)


def interval_text(change: Change) -> str:
    """Return the bounds of a change as people read them; "" without any."""
    if change.low is None or change.high is None:
        return ""
    low, high = (_text(change, bound) for bound in (change.low, change.high))
    return f"{low.removesuffix(_POINTS)} to {high}"


def change_text(change: Change) -> str:
    """Return a change as people read it: in percent of A; in points of a share, or where A is 0 in the unit."""
    return _text(change, change.change)


def _text(change: Change, value: float) -> str:
    if change.is_relative:
        return f"{100 * value:+.1f}%" if value < _MOST_TOLD else f"> +{100 * _MOST_TOLD:.0f}%"
    if change.measure.kind is Kind.SHARE:
        return f"{100 * value:+.1f}{_POINTS}"
    return ("+" if value >= 0 else "-") + shown(change.measure, abs(value))
