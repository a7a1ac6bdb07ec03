"""What a report on a contract says, from the document of `bench run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.bench.measures import measure
from localllm.bench.reports.cells import Cell, cells_of, distinct
from localllm.bench.reports.curves import charts, panels
from localllm.bench.reports.document import Document
from localllm.bench.reports.page import Page, Row, Section, Table
from localllm.bench.reports.serve_page import PARTIAL, client_note, failures
from localllm.bench.reports.words import (
    HOW,
    HOW_CONTRACT,
    NONE,
    command_text,
    count,
    flat,
    machine_facts,
    measured,
    number,
    share,
    size,
    version_text,
)
from localllm.bench.stats.summaries import median

MAX_PLACES = 3

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("TTFT p50", "ttft_p50"),
    ("p95", "ttft_p95"),
    ("TPOT p50", "tpot_p50"),
    ("p95", "tpot_p95"),
    ("E2E p95", "e2e_p95"),
    ("tok/s", "output_throughput"),
    ("req/s", "request_throughput"),
    ("goodput", "goodput"),
    ("errors", "error"),
    ("cached", "cached_share"),
    ("accepted", "accepted_share"),
    ("valid", "valid_share"),
    ("memory", "peak_memory"),
    ("J/token", "joules_per_token"),
)


def contract_page(document: Document) -> Page:
    """Return what there is to say of a contract that was measured."""
    cells = cells_of(document)
    fingerprint = document.get("fingerprint") or {}
    return Page(
        title=str(document.get("title") or "A contract"),
        facts=machine_facts(fingerprint),
        alarms=(*((PARTIAL,) if document.get("partial") else ()), *_failed(document)),
        sections=(
            Section("Rules", tuple(_verdict(document)), (_rules(document),)),
            Section("Ranking", tuple(_no_ranking(document)), tuple(_rankings(document))),
            Section("Differences between the candidates", bullets=tuple(_differences(document))),
            Section("Candidates", tables=(_candidates(document),)),
            Section("Left out, and why", bullets=tuple(_left_out(document, cells))),
            *(Section(f"Plots: {p.title}", charts=charts(p), is_detail=True) for p in panels(cells)),
            *_results(document, cells),
            Section("Notes", bullets=tuple(_notes(document, cells))),
            Section("How it is measured", (*HOW_CONTRACT, *HOW), is_detail=True),
            Section("The contract", tables=(_facts(_contract_facts(document)),), is_detail=True),
            Section("Machine and software", tables=(_facts(fingerprint),), is_detail=True),
        ),
    )


def _failed(document: Document) -> Iterator[str]:
    rules = document.get("rules") or []
    n_failed = sum(not rule["passed"] for rule in rules)
    if n_failed:
        yield f"{n_failed} of {len(rules)} rules failed."


def _verdict(document: Document) -> Iterator[str]:
    rules = document.get("rules") or []
    if not rules:
        yield "The contract has no rules."
    elif all(rule["passed"] for rule in rules):
        yield f"All {len(rules)} rules hold." if len(rules) > 1 else "The rule holds."


def _rules(document: Document) -> Table:
    rows = [
        (
            str(rule["text"]),
            _told(rule, rule.get("value")),
            _told(rule, rule.get("bound")),
            "holds" if rule["passed"] else "FAILED",
            str(rule.get("why") or ""),
        )
        for rule in document.get("rules") or ()
    ]
    has_why = any(row[-1] for row in rows)
    head = ("rule", "found", "bound", "", "because")
    if has_why:
        return Table(head, tuple(rows), ends_in_words=True)
    return Table(head[:-1], tuple(row[:-1] for row in rows))


def _told(rule: Mapping[str, Any], value: Any) -> str:
    """Return a rule's number with its unit, a ratio as one; a bound may be words."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value) if value else NONE
    return f"{value:.3g}x" if rule.get("is_ratio") or not rule.get("measure") else measured(rule["measure"], value)


def _no_ranking(document: Document) -> Iterator[str]:
    why = document.get("no_ranking")
    if why:
        yield str(why) if document.get("ranking") else f"There is no ranking. {why}"
    entries = [entry for ranking in document.get("ranking") or () for entry in ranking["order"]]
    yield from (f"Tied where marked so: {why}." for why in distinct(e["why"] for e in entries if e.get("why")))


def _rankings(document: Document) -> Iterator[Table]:
    for ranking in document.get("ranking") or ():
        by = measure(ranking["by"])
        better = "less is better" if by.lower_is_better else "more is better"
        where = ", ".join(str(ranking[key]) for key in ("model", "workload", "cache", "load") if ranking.get(key))
        rows = tuple(_ranked(by.name, place, entry) for place, entry in enumerate(ranking["order"], 1))
        head = ("", "candidate", by.name, "to the first", "95 % interval", "")
        yield Table(head, rows, 2, ends_in_words=True, caption=f"{where}, by {by.name} ({better})")


def _ranked(by: str, place: int, entry: Mapping[str, Any]) -> Row:
    low, high, ratio = entry.get("low"), entry.get("high"), entry.get("ratio")
    has_interval = low is not None and high is not None and place > 1 and entry.get("n_pairs") != 1
    interval = f"{low:.3f} to {high:.3f}" if has_interval else NONE
    tied = "tied with the first" if entry.get("tied") and place > 1 else ""
    factor = NONE if ratio is None else f"{ratio:.3f}"
    return str(place), str(entry["candidate"]), measured(by, entry.get("value")), factor, interval, tied


def _differences(document: Document) -> Iterator[str]:
    differences = document.get("differences") or ()
    has_models = len({difference.get("model") for difference in differences}) > 1
    for difference in differences:
        of = f"{difference['model']}, " if has_models else ""
        forbids = " This forbids a ranking." if difference.get("forbids_ranking") else ""
        yield f"{of}{difference['what']}: {difference['sentence']}{forbids}"


def _candidates(document: Document) -> Table:
    rows = [
        (
            str(candidate["name"]),
            str(candidate.get("model") or NONE),
            version_text(candidate.get("server") or {}) or NONE,
            command_text(candidate.get("command") or candidate.get("url") or NONE),
            _ready(candidate),
        )
        for candidate in document.get("candidates") or ()
    ]
    return Table(("candidate", "model", "version", "command or URL", "ready after"), tuple(rows), 4)


def _ready(candidate: Mapping[str, Any]) -> str:
    told = [float(value) for value in candidate.get("ready_s") or () if value is not None]
    return measured("ready", 1e3 * median(told)) if told else NONE


def _results(document: Document, cells: Sequence[Cell]) -> Iterator[Section]:
    """Yield a section a workload, a table a cache and load: a row each candidate."""
    n_used = {id(cell): n for cell, n in zip(cells, _used_told(document), strict=True)}
    models = {str(one["name"]): str(one.get("model") or "") for one in document.get("candidates") or ()}
    for workload in distinct(cell.workload for cell in cells):
        of = [cell for cell in cells if cell.workload == workload]
        places = dict.fromkeys((cell.cache, str(cell.load)) for cell in of)
        by_place = {place: [c for c in of if (c.cache, str(c.load)) == place] for place in places}
        counted = {place: found for place, found in by_place.items() if any(cell.used for cell in found)}
        nothing = [f"{', '.join(p)}: no round of any candidate counts." for p in places if p not in counted]
        tables = [_cell_table(found, n_used, models, ", ".join(place)) for place, found in counted.items()]
        units = ("Times in milliseconds; medians over the rounds used.",) if tables else ()
        yield Section(f"Results: {workload}", (*units, *nothing), tuple(tables))


def _used_told(document: Document) -> Iterator[str]:
    for cell in document.get("cells") or ():
        yield f"{cell.get('n_used', NONE)}/{len(cell.get('rounds', ()))}"


def _cell_table(cells: Sequence[Cell], n_used: Mapping[int, str], models: Mapping[str, str], caption: str) -> Table:
    of_model = [models.get(cell.candidate, "") for cell in cells]
    columns = [(title, name, [cell.value(name) for cell in cells]) for title, name in _COLUMNS]
    kept = [(title, [_cell(name, v) for v in found]) for title, name, found in columns if set(found) != {None}]
    columns_of_words = [[cell.candidate for cell in cells], *([of_model] if len(set(of_model)) > 1 else [])]
    used = [n_used[id(cell)] for cell in cells]
    head = (*("candidate", "model")[: len(columns_of_words)], "used", *(title for title, _ in kept))
    rows = tuple(zip(*columns_of_words, used, *(texts for _, texts in kept), strict=True))
    return Table(head, rows, len(columns_of_words), caption)


def _cell(name: str, value: float | None) -> str:
    if name == "peak_memory":
        return size(value)
    return share(value) if measure(name).kind.value == "share" else number(value)


def _left_out(document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    for candidate in document.get("candidates") or ():
        if candidate.get("left_out"):
            yield f"{candidate['name']}: {candidate['left_out']}"
    unsupported = {(cell.candidate, cell.workload): cell.unsupported for cell in cells if cell.unsupported}
    for (name, workload), why in unsupported.items():
        yield f"{name} cannot do {workload}: {why}"
    disturbed = [(cell, r) for cell in cells for r in cell.rounds if r.get("disturbances")]
    for name in distinct(cell.candidate for cell, _ in disturbed):
        rounds = [(cell, r) for cell, r in disturbed if cell.candidate == name]
        what = "; ".join(distinct(text for _, r in rounds for text in r["disturbances"]))
        where = distinct(f"{cell.workload}, {cell.cache}, {cell.load}" for cell, _ in rounds)
        n_rounds = sum(len(cell.rounds) for cell in cells if cell.candidate == name)
        places = f" ({'; '.join(where)})" if len(where) <= MAX_PLACES else f" (in {len(where)} cells)"
        yield f"{name}: {len(rounds)} of {n_rounds} rounds are not used{places}: {what}"


def _notes(document: Document, cells: Sequence[Cell]) -> Iterator[str]:
    for name in distinct(cell.candidate for cell in cells):
        runs = [r for cell in cells if cell.candidate == name for r in cell.rounds]
        yield from (f"{name}: {line}" for line in failures(runs))
        n_over = sum(int(r.get("n_over_limit") or 0) for r in runs)
        if n_over:
            yield f"{name}: {count(n_over)} answers were longer than max_tokens allows"
        for source in distinct(r["token_source"] for r in runs if r.get("token_source", "usage") != "usage"):
            yield f"{name}: output tokens are counted by: {source}"
        yield from (f"{name}: {note}" for note in distinct(note for r in runs for note in r.get("notes", ())))
    for candidate in document.get("candidates") or ():
        yield from (f"{candidate['name']}: {note}" for note in candidate.get("notes") or ())
    yield from client_note(document, [r for cell in cells for r in cell.rounds])


def _contract_facts(document: Document) -> dict[str, Any]:
    return {"sha256": document.get("contract_sha256"), **(document.get("contract") or {})}


def _facts(found: Mapping[str, Any]) -> Table:
    return Table(("fact", "value"), tuple(flat(found)), 2)
