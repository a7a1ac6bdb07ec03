"""Which cells of two files are the same thing measured twice, and what keeps two from being comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from localllm.bench.compare.cell import Cell, Origin
from localllm.bench.machine.changes import machine_changes, software_changes

CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True)
class Pair:
    """A cell of each file. `name`: what both are called, with what tells them from others of that name."""

    name: str
    a: Cell
    b: Cell


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs, and a sentence for each cell that has no other."""

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]


def paired(a: Sequence[Cell], b: Sequence[Cell]) -> Pairs:
    """Return which cells belong together: those called the same; else, where there are as many, in their order."""
    for key in (_full_key(a, b), _without_candidate):
        found = _by_key(a, b, key)
        if found.pairs:
            return found
    if len(a) == len(b):
        return Pairs(tuple(Pair(_both_names(x, y), x, y) for x, y in zip(a, b, strict=True)), ())
    return Pairs((), ())


def _both_names(a: Cell, b: Cell) -> str:
    return a.name if a.name == b.name else f"{a.name} / {b.name}"


def _full_key(a: Sequence[Cell], b: Sequence[Cell]) -> Callable[[Cell], str]:
    """Return what tells the cells apart: their name, and the settings that vary among those of one name in a file."""
    varying: dict[str, list[str]] = {}
    for cells in (a, b):
        for name, n in Counter(cell.name for cell in cells).items():
            if n > 1:
                found = [{**cell.facts, **cell.settings} for cell in cells if cell.name == name]
                fields = dict.fromkeys(field for settings in found for field in settings)
                more = [field for field in fields if len({settings.get(field) for settings in found}) > 1]
                varying[name] = list(dict.fromkeys((*varying.get(name, []), *more)))

    def key(cell: Cell) -> str:
        settings = {**cell.facts, **cell.settings}
        return ", ".join([cell.name, *(f"{field} {settings.get(field, '?')}" for field in varying.get(cell.name, ()))])

    return key


def _without_candidate(cell: Cell) -> str:
    candidate = cell.facts.get(CANDIDATE, "")
    return cell.name.removeprefix(f"{candidate}, ") if candidate else cell.name


def _by_key(a: Sequence[Cell], b: Sequence[Cell], key: Callable[[Cell], str]) -> Pairs:
    notes: list[str] = []
    of_a, of_b = _by_name(a, key, "A", notes), _by_name(b, key, "B", notes)
    for letter, side, other in (("A", of_a, of_b), ("B", of_b, of_a)):
        notes += [f"{name}: only in {letter}" for name in side if name not in other]
    pairs = tuple(Pair(name, cell, of_b[name]) for name, cell in of_a.items() if name in of_b)
    return Pairs(pairs, tuple(notes))


def _by_name(cells: Sequence[Cell], key: Callable[[Cell], str], letter: str, notes: list[str]) -> dict[str, Cell]:
    """Return the cells by what `key` calls them; of those called the same none, and a note."""
    times = Counter(map(key, cells))
    notes += [f"{name}: {n} times in {letter}, none of them used" for name, n in times.items() if n > 1]
    return {key(cell): cell for cell in cells if times[key(cell)] == 1}


def obstacles(a: Cell, b: Cell) -> Iterator[str]:
    """Yield a sentence for each reason why a change from `a` to `b` says nothing of what was to be compared."""
    yield from _machine_obstacles(a.origin, b.origin)
    if not a.model.is_same(b.model):
        names = a.model.name or "not told", b.model.name or "not told"
        differ = f"{names[0]} in A, {names[1]} in B"
        yield f"model: {differ if names[0] != names[1] else f'both are called {names[0]}, the files differ'}"
    one_sided: dict[str, list[str]] = {"A": [], "B": []}
    for what in dict.fromkeys((*a.facts, *b.facts)):
        if what == CANDIDATE:
            continue
        if what not in a.facts or what not in b.facts:
            one_sided["A" if what in a.facts else "B"].append(what)
        elif a.facts[what] != b.facts[what]:
            yield f"{what}: {a.facts[what]} in A, {b.facts[what]} in B"
    for letter, names_told in one_sided.items():
        if names_told:
            yield f"only {letter} tells its {', '.join(names_told)}"
    for letter, cell in (("A", a), ("B", b)):
        yield from (f"{letter}: {doubt}" for doubt in cell.doubts)


def _machine_obstacles(a: Origin, b: Origin) -> Iterator[str]:
    if a.fingerprint is not None and b.fingerprint is not None:
        found = _changes(machine_changes, a, b)
        if a.fingerprint_id and b.fingerprint_id:
            if a.fingerprint_id != b.fingerprint_id:
                yield from (f"machine: {change}" for change in found or ["it is another, or another state of it"])
        else:
            yield from (f"machine: {change}" for change in found)
    elif a.machine and b.machine:
        if a.machine != b.machine:
            yield f"machine: {a.machine} in A, {b.machine} in B"
    elif (a.fingerprint is None) != (b.fingerprint is None):
        yield f"machine: only {'B' if a.fingerprint is None else 'A'} tells what it ran on"


def caveats(a: Cell, b: Cell) -> Iterator[str]:
    """Yield a sentence for each thing to know of a comparison that is allowed."""
    lacking = [letter for letter, cell in (("A", a), ("B", b)) if cell.origin.fingerprint is None]
    if lacking:
        who = "neither file has" if len(lacking) == 2 else f"{lacking[0]} does not have"
        if a.origin.machine and b.origin.machine:
            yield f"{who} a fingerprint: that both ran on one machine is known by the CPU's and GPU's names alone"
        else:
            yield f"{who} a fingerprint: whether both ran on one machine is not known"
    elif not (a.origin.fingerprint_id and b.origin.fingerprint_id):
        yield "a fingerprint names no machine: whether both ran on one is known by what they tell of it alone"
    else:
        yield from (f"software: {change}" for change in _changes(software_changes, a.origin, b.origin))
    for what in dict.fromkeys((*a.settings, *b.settings)):
        old, new = a.settings.get(what), b.settings.get(what)
        if old is not None and new is not None and old != new:
            yield f"{what}: {old} in A, {new} in B"
    candidates = [cell.facts.get(CANDIDATE, "") for cell in (a, b)]
    if candidates[0] != candidates[1]:
        yield f"candidate: {candidates[0] or 'none named'} in A, {candidates[1] or 'none named'} in B"
    for letter, cell in (("A", a), ("B", b)):
        yield from (f"{letter}: {note}" for note in cell.notes)


def _changes(of: Callable[..., list[str]], a: Origin, b: Origin) -> list[str]:
    """Return what `of` says; a fingerprint that somebody edited is no reason to fail."""
    try:
        return of(a.fingerprint, b.fingerprint)
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError):
        return ["what the fingerprints say cannot be read"]
