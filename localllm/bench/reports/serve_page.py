"""What a report on one server says, from the document of `bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from localllm.bench.measures import LATENCIES, measure
from localllm.bench.reports.cells import cells_of, labels, load_of
from localllm.bench.reports.curves import Panel, charts, panels
from localllm.bench.reports.document import LATENCY_FIELDS, Document, run_value
from localllm.bench.reports.page import Page, Row, Section, Table
from localllm.bench.reports.words import (
    HOW,
    count,
    flat,
    machine_facts,
    measured,
    number,
    server_words,
    share,
    size,
)

MAX_COLUMNS = 4
"""Of more runs, each is a row."""

MAX_FAILURES = 5

SHORT_NAMES = {"ttft": "TTFT", "answer_ttft": "TTFT, answer", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"} | {
    "queue": "Queue"
}
PARTIAL = "Partial: it was ended before everything was measured."
_STATISTICS = ("min", "p50", "p90", "p95", "p99", "max")


def serve_page(document: Document) -> Page:
    """Return what there is to say of one `bench serve`."""
    runs = list(document.get("runs", ()))
    names = labels(cells_of(document))
    fingerprint = document.get("fingerprint") or {}
    done = [(run, name) for run, name in zip(runs, names, strict=True) if not run.get("unsupported")]
    done_runs, done_names = [run for run, _ in done], [name for _, name in done]
    return Page(
        title=f"localllm bench serve: {runs[0]['model_id'] if runs else 'nothing measured'}",
        facts=(*machine_facts(fingerprint), *_settings_line(runs)),
        alarms=(*((PARTIAL,) if document.get("partial") else ()), *alarms(runs, names)),
        sections=(
            *([Section("Result", tables=tuple(_results(done_runs, done_names)))] if done else []),
            Section("Knee", tuple(_knee(document))),
            Section("Objective", tables=(_objective(runs, names),)),
            *(_plots(panel) for panel in panels(cells_of(document))),
            *_latencies(done_runs, done_names),
            Section("Notes", bullets=tuple(_notes(document, runs, names))),
            Section("How it is measured", HOW, is_detail=True),
            Section("Settings", tables=(_settings(runs, names),), is_detail=True),
            Section("Machine, software and server", tables=(_facts(fingerprint),), is_detail=True),
        ),
    )


def _plots(panel: Panel) -> Section:
    warning = ("Runs that are not to be used are drawn too.",) if any(cell.is_disturbed for cell in panel.cells) else ()
    return Section(f"Plots: {panel.title}", warning, charts=charts(panel), is_detail=True)


def _settings_line(runs: Sequence[Document]) -> Iterator[str]:
    """Yield one line of what all runs share."""
    if runs:
        first = runs[0]
        shared = {
            "workload": all(r["workload"] == first["workload"] for r in runs) and first["workload"],
            "cache": all(r["cache"] == first["cache"] for r in runs) and first["cache"],
            "load": all(r["load"] == first["load"] for r in runs) and str(load_of(first["load"])),
        }
        server = " ".join(["server", *server_words(first.get("server") or {})])
        told = [f"{name} {value}" if name != "load" else str(value) for name, value in shared.items() if value]
        yield ", ".join([*told, f"seed {first['seed']}", first["api"], *([server] if server != "server" else [])])


def alarms(runs: Sequence[Document], names: Sequence[str]) -> Iterator[str]:
    """Yield what a reader must know before any number: what could not be measured, what was disturbed."""
    for what in dict.fromkeys((run["workload"], run["unsupported"]) for run in runs if run.get("unsupported")):
        of = [(run["workload"], run.get("unsupported")) == what for run in runs]
        yield f"Not measured{_which(of, names)}: {what[0]} is not supported: {what[1]}"
    for text in dict.fromkeys("; ".join(run["disturbances"]) for run in runs if run.get("disturbances")):
        of = ["; ".join(run.get("disturbances") or ()) == text for run in runs]
        yield f"Not to be used{_which(of, names)}: {text}"


def _which(of: Sequence[bool], names: Sequence[str]) -> str:
    """Return which runs something is said of, in brackets; "" where it is all."""
    return "" if all(of) else f" ({'; '.join(name for name, is_of in zip(names, of, strict=True) if is_of)})"


def _peak(run: Document) -> float | None:
    """Return the most tokens of a second; None where a run of few seconds has less in each than it has on average."""
    peak, average = run["max_output_tokens_per_s"], run["output_throughput"]
    return None if peak is not None and average is not None and peak < average else peak


_LINES: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("Successful requests", lambda r: count(r["completed"])),
    ("Failed requests", lambda r: count(r["failed"])),
    ("Maximum request concurrency", lambda r: count(r["max_concurrency"])),
    ("Request rate configured (RPS)", lambda r: "-" if r["request_rate"] == "inf" else number(r["request_rate"])),
    ("Benchmark duration (s)", lambda r: number(r["duration"])),
    ("Total input tokens", lambda r: count(r["total_input_tokens"])),
    ("Total generated tokens", lambda r: count(r["total_output_tokens"])),
    ("Request throughput (req/s)", lambda r: number(r["request_throughput"])),
    ("Request goodput (req/s)", lambda r: number(r["request_goodput"])),
    ("Goodput (share of requests)", lambda r: share(r["goodput"])),
    ("Output token throughput (tok/s)", lambda r: number(r["output_throughput"])),
    ("Peak output token throughput (tok/s)", lambda r: number(_peak(r))),
    ("Peak concurrent requests", lambda r: count(r["max_concurrent_requests"])),
    ("Total token throughput (tok/s)", lambda r: number(r["total_token_throughput"])),
    ("Prompt tokens from a cache", lambda r: share(r["cached_share"])),
    ("Drafted tokens accepted", lambda r: share(r["accepted_share"])),
    ("Answers valid under their schema", lambda r: share(r["valid_share"])),
    ("Server ready after", lambda r: measured("ready", r["ready_ms"])),
    ("Peak memory of the server", lambda r: size(r["peak_memory_bytes"])),
    ("CPU time of the server (s)", lambda r: number(r["server_cpu_s"])),
    ("Energy an output token (J)", lambda r: number(r["joules_per_token"])),
)


def _results(runs: Sequence[Document], names: Sequence[str]) -> Iterator[Table]:
    """Yield the totals: a column a run; of many runs a row each first."""
    if len(runs) > MAX_COLUMNS:
        yield overview(runs, names, "run")
        return
    found = [(line, *(write(run) for run in runs)) for line, write in _LINES if runs]
    yield Table(("", *(names if len(runs) > 1 else ("",))), tuple(row for row in found if set(row[1:]) != {"-"}))


OVERVIEW: tuple[tuple[str, str], ...] = (
    ("req/s", "request_throughput"),
    ("tok/s", "output_throughput"),
    ("TTFT p50", "ttft_p50"),
    ("p95", "ttft_p95"),
    ("TPOT p50", "tpot_p50"),
    ("p95", "tpot_p95"),
    ("E2E p95", "e2e_p95"),
    ("goodput", "goodput"),
    ("errors", "error"),
    ("cached", "cached_share"),
)


def overview(runs: Sequence[Document], names: Sequence[str], head: str) -> Table:
    """Return a row for each run with what matters most; times in ms. Columns that no run has are left out."""
    columns = [(title, [run_value(run, name) for run in runs], name) for title, name in OVERVIEW]
    kept = [(title, [_cell(name, v) for v in found]) for title, found, name in columns if set(found) != {None}]
    rows = tuple((name, *(cells[i] for _, cells in kept)) for i, name in enumerate(names))
    return Table((head, *(title for title, _ in kept)), rows)


def _cell(name: str, value: float | None) -> str:
    return share(value) if measure(name).kind.value == "share" else number(value)


def _latencies(runs: Sequence[Document], names: Sequence[str]) -> Iterator[Section]:
    table = latency_table(runs, names)
    if table.rows:
        yield Section("Latencies", ("In milliseconds.",), (table,))


def latency_table(runs: Sequence[Document], names: Sequence[str]) -> Table:
    """Return every latency's statistics, in ms; those that no run has are left out."""
    rows: list[Row] = []
    for base in LATENCIES:
        field = LATENCY_FIELDS[base]
        of = [(run, name) for run, name in zip(runs, names, strict=True) if run[f"p50_{field}_ms"] is not None]
        if base == "answer_ttft" and not any(_thinks_first(run) for run, _ in of):
            continue  # it would say the same twice
        for place, (run, name) in enumerate(of):
            cells = [number(run[f"{statistic}_{field}_ms"]) for statistic in _STATISTICS]
            rows.append((SHORT_NAMES[base] if place == 0 else "", *((name,) if len(runs) > 1 else ()), *cells))
    return Table(("", *(("run",) if len(runs) > 1 else ()), *_STATISTICS), tuple(rows), 2 if len(runs) > 1 else 1)


def _thinks_first(run: Document) -> bool:
    return any(run[f"{statistic}_answer_ttft_ms"] != run[f"{statistic}_ttft_ms"] for statistic in _STATISTICS)


def _objective(runs: Sequence[Document], names: Sequence[str]) -> Table:
    """Return each limit of the SLO with what was measured: a row a limit, of several runs a row each."""
    of = [(run["slo"]["verdicts"], name) for run, name in zip(runs, names, strict=True) if run.get("slo")]
    if not of:
        return Table(("",), ())
    limits = [f"{verdict['measure']} {_bound(verdict)}" for verdict in of[0][0]]
    if len(runs) == 1:
        lines = [(limit, *_judged(verdict)) for limit, verdict in zip(limits, of[0][0], strict=True)]
        return Table(("limit", "measured", ""), tuple(lines))
    rows = [
        (name, *(_judged(verdict)[0] for verdict in verdicts), _verdict(verdict["met"] for verdict in verdicts))
        for verdicts, name in of
    ]
    return Table(("run", *limits, ""), tuple(rows))


def _bound(verdict: Document) -> str:
    of = measure(verdict["measure"])
    return f"{'≤' if of.lower_is_better else '≥'} {measured(of.name, verdict['limit'])}"


def _judged(verdict: Document) -> tuple[str, str]:
    return measured(verdict["measure"], verdict["value"]), _verdict([verdict["met"]])


def _verdict(met: Iterable[bool]) -> str:
    return "met" if all(met) else "NOT MET"


def _knee(document: Document) -> Iterator[str]:
    knee = document.get("knee")
    if knee:
        cache = f" ({knee['cache']})" if knee.get("cache") else ""
        gives = f"{number(knee['output_tokens_per_s'])} output tokens and {number(knee['requests_per_s'])} answers"
        yield f"The knee is at {load_of(knee['load'])}{cache}: {gives} a second. It is {knee['why']}."


def _notes(document: Document, runs: Sequence[Document], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        which = f"{name}: " if len(runs) > 1 else ""
        yield from (f"{which}{line}" for line in failures([run]))
        if run["n_over_limit"]:
            yield f"{which}{run['n_over_limit']} answers were longer than max_tokens allows"
    for note in dict.fromkeys(note for run in runs for note in run.get("notes", ())):
        yield note + _which([note in run.get("notes", ()) for run in runs], names)
    for source in dict.fromkeys(run["token_source"] for run in runs):
        if source != "usage":
            yield f"output tokens are counted by: {source}"
    yield from client_note(document, runs)


def failures(runs: Sequence[Document]) -> Iterator[str]:
    """Yield how requests failed, the most frequent ways first."""
    found = Counter(error for run in runs for error in run.get("errors", ()) if error)
    for error, n in found.most_common(MAX_FAILURES):
        yield f"{n} failed: {error}"
    rest = found.total() - sum(n for _, n in found.most_common(MAX_FAILURES))
    if rest:
        yield f"{rest} failed in other ways"


def client_note(document: Document, runs: Sequence[Document]) -> Iterator[str]:
    """Yield what the client itself cost: in these runs, and against a server that does nothing."""
    costs = [run["client_cpu_ms_per_token"] for run in runs if run.get("client_cpu_ms_per_token") is not None]
    calibrated = (document.get("calibration") or {}).get("cpu_ms_per_token")
    if costs or calibrated is not None:
        told = [f"{max(costs):.2f} ms in these runs"] if costs else []
        told += [f"{calibrated:.3f} ms against a server that does nothing"] if calibrated is not None else []
        yield f"CPU of the client a token: {', '.join(told)}"


def _settings(runs: Sequence[Document], names: Sequence[str]) -> Table:
    keys = ("workload", "cache", "load", "seed", "answers", "token_source", "n_warmup", "num_prompts", "api", "slo")
    rows: list[Row] = []
    for key in (*keys, "began_at", "memory_kind", "joules_of"):
        cells = [_setting(run, key) for run in runs]
        if any(cell != "-" for cell in cells):
            rows.append((key, *cells))
    if runs:
        rows += [
            (f"workload: {name}", value, *[""] * (len(runs) - 1)) for name, value in flat(runs[0]["workload_facts"])
        ]
    return Table(("setting", *(names if len(runs) > 1 else ("value",))), tuple(rows), 1 + len(runs))


def _setting(run: Document, key: str) -> str:
    value: Any = run.get(key)
    if key == "load":
        return str(load_of(value))
    if key == "slo":
        value = (value or {}).get("text")
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {text}" for name, text in flat(value))
    return "-" if value in (None, "", []) else ", ".join(value) if isinstance(value, list) else str(value)


def _facts(fingerprint: Mapping[str, Any]) -> Table:
    return Table(("fact", "value"), tuple(flat(fingerprint)), 2)
