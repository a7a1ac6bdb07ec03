"""Turns the rules of a contract into terms, one a cell, and refuses those that nothing can keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from localllm.bench.contract.cells import NEEDS_SLO, OF_START
from localllm.bench.contract.places import Place, Places
from localllm.bench.contract.tables import RuleTable
from localllm.bench.contract.terms import Candidate, Cell, Key, Rule
from localllm.bench.measures import Kind, Measure, measure, value_of
from localllm.bench.workloads.parse import parse_workload
from localllm.errors import UsageError


def rules_of(
    tables: Sequence[RuleTable], candidates: Sequence[Candidate], cells: Sequence[Cell], places: Places
) -> tuple[Rule, ...]:
    """Return the rules, each once for every cell that it speaks of. Raises UsageError naming the place."""
    return tuple(
        rule
        for index, table in enumerate(tables)
        for rule in _Checking(table, places.of("rule", index), candidates, cells).rules()
    )


class _Checking:
    """One rule's table on its way to terms."""

    def __init__(self, table: RuleTable, place: Place, candidates: Sequence[Candidate], cells: Sequence[Cell]) -> None:
        self._table = table
        self._place = place
        self._candidates = candidates
        self._cells = cells

    def rules(self) -> list[Rule]:
        table = self._table
        with self._place.at("measure"):
            of = measure(table.measure)
        candidate = self._candidate(table.candidate, "candidate")
        over = self._over()
        at_most, at_least = (self._bound(of, key) for key in ("at_most", "at_least"))
        self._check_bounds(of, at_most, at_least)
        bounds = [(bound, upper) for bound, upper in ((at_most, True), (at_least, False)) if bound is not None]
        cells: list[Cell] = []
        if of.name == OF_START:
            self._check_start(candidate)
        else:
            cells = self._matching(of)
        keys, number = tuple(cell.key for cell in cells), self._place.index + 1
        return [
            Rule(number, of, candidate.name, keys, self._where(keys), bound, is_upper, over)
            for bound, is_upper in bounds
        ]

    def _where(self, keys: Sequence[Key]) -> str:
        """Return the cells in words: all three parts of a single one, else what they have in common."""
        if not keys:
            return ""
        shared = [part[0] for part in zip(*keys, strict=True) if len(set(part)) == 1]
        return ", ".join(shared) if shared else "everywhere"

    def _candidate(self, name: str, key: str) -> Candidate:
        for candidate in self._candidates:
            if candidate.name == name:
                return candidate
        names = ", ".join(candidate.name for candidate in self._candidates)
        raise self._place.mistake(f"there is no candidate {name!r}; there are {names}.", key)

    def _over(self) -> str:
        if self._table.over is None:
            return ""
        over = self._candidate(self._table.over, "over").name
        if over == self._table.candidate:
            raise self._place.mistake("a candidate over itself is always 1.", "over")
        return over

    def _bound(self, of: Measure, key: str) -> float | None:
        """Return a bound in the measure's unit, or as a ratio."""
        given: float | str | None = getattr(self._table, key)
        if given is None:
            return None
        if self._table.over is not None:
            return self._ratio(given, key)
        text = given if isinstance(given, str) else repr(given).removesuffix(".0")
        with self._place.at(key):
            return value_of(of, text)

    def _ratio(self, given: float | str, key: str) -> float:
        try:
            ratio = float(given)
        except (ValueError, OverflowError):
            ratio = math.nan
        if not 0 < ratio < math.inf:
            raise self._place.mistake(f"{key} is a ratio here, above 0, not {given!r}.", key, f"{key} = 1.1")
        return ratio

    def _check_bounds(self, of: Measure, at_most: float | None, at_least: float | None) -> None:
        if at_most is None and at_least is None:
            raise self._place.mistake("a rule needs at_most or at_least.", "", 'at_most = "500ms"')
        for key, bound in (("at_most", at_most), ("at_least", at_least)):
            if bound is not None and not math.isfinite(bound):
                raise self._place.mistake(f"{key} is beyond every number.", key)
        if at_most is not None and at_least is not None and at_least > at_most:
            raise self._place.mistake("nothing keeps both: at_least is above at_most.", "at_least")
        if at_most == 0 and of.kind is not Kind.SHARE:
            raise self._place.mistake(f"nothing keeps {of.name} at 0: it is always above.", "at_most")

    def _check_start(self, candidate: Candidate) -> None:
        named = [candidate, *(c for c in self._candidates if c.name == self._table.over)]
        for each in named:
            if each.url:
                raise self._place.mistake(
                    f"{each.name} is given by its url: how long it took to start is not seen.", "measure"
                )
        for key in ("workload", "cache", "load"):
            if getattr(self._table, key) is not None:
                raise self._place.mistake(f"the start is of no workload: leave out {key}.", key)

    def _matching(self, of: Measure) -> list[Cell]:
        """Return the cells that the rule speaks of: all, as far as it does not say which."""
        cells = list(self._cells)
        for key in ("workload", "cache", "load"):
            asked: str | None = getattr(self._table, key)
            if asked is None:
                continue
            there = list(dict.fromkeys(_named(cell, key) for cell in cells))
            cells = [cell for cell in cells if _is_named(cell, key, asked)]
            if not cells:
                raise self._place.mistake(
                    f"the {key} {asked!r} is not measured{self._there(key)}; measured are: {'; '.join(there)}.", key
                )
        unset = [cell for cell in cells if cell.slo is None]
        if of.name in NEEDS_SLO and unset:
            raise self._place.mistake(f"{of.name} needs an SLO, and {unset[0].workload.spec} has none.", "measure")
        return cells

    def _there(self, key: str) -> str:
        of = self._table.workload
        return f" of {of}" if of is not None and key != "workload" else ""


def _named(cell: Cell, key: str) -> str:
    workload, cache, load = cell.key
    return {"workload": workload, "cache": cache, "load": load}[key]


def _is_named(cell: Cell, key: str, asked: str) -> bool:
    """Say whether a rule's word names the cell: as it is spelled anywhere or, of a workload, by its kind alone."""
    spelled, asked = _named(cell, key), asked.strip()
    if key == "workload" and ":" in asked:
        with suppress(UsageError):  # "rag:documents=2,answer=8" is "rag:answer=8,documents=2"
            asked = parse_workload(asked).spec
    return spelled == asked or (key == "workload" and spelled.partition(":")[0] == asked)
