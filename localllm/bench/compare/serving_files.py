"""Reads what serving benchmarks wrote: ours, a contract's, and vLLM's with or without a list entry a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from localllm.bench.compare.cell import Cell, Model, Origin, Requests
from localllm.bench.compare.fields import Fields, Malformed, optional_numbers
from localllm.bench.measures import LATENCIES, SCALARS, STATISTICS
from localllm.bench.reports.document import LATENCY_FIELDS, SCALAR_FIELDS
from localllm.bench.serving.spec import Load

_AGREE = ("workload", "cache", "load", "seed", "answers", "api")
_N_WINDOWS = 20
_FEWEST_FOR_WINDOWS = 10


def serve_cells(document: Fields, path: str) -> Iterator[Cell]:
    """Yield a cell for each run of a `bench serve`. Raises Malformed."""
    fingerprint, doubts = document.inner("fingerprint"), _doubts(document)
    origin = _origin(path, "bench serve", fingerprint)
    sha256 = _sha256(fingerprint)
    for run in document.objects("runs"):
        cell = _run_cell(run, origin, sha256)
        yield replace(cell, doubts=tuple(dict.fromkeys((*doubts, *cell.doubts))))


def contract_cells(document: Fields, path: str) -> Iterator[Cell]:
    """Yield a cell for each candidate, workload, cache and load of a contract; its rounds stay apart. Raises Malformed.

    Rounds that were disturbed, interrupted or refused are left out where there are others.
    """
    origin = _origin(path, "bench run", document.inner("fingerprint"))
    doubts = _doubts(document)
    for found in document.objects("cells"):
        rounds = [_run_cell(run, origin, ()) for run in found.objects("rounds")]
        if not rounds:
            continue
        good = [each for each in rounds if not each.doubts]
        cell = _together(good or rounds)
        left_out = len(rounds) - len(good) if good else 0
        notes = (f"{left_out} of {len(rounds)} rounds not used: disturbed or interrupted",) if left_out else ()
        candidate = found.text("candidate")
        yield replace(
            cell,
            name=f"{candidate}, {cell.name}" if candidate else cell.name,
            facts={"candidate": candidate, **cell.facts},
            doubts=tuple(dict.fromkeys((*doubts, *cell.doubts))),
            notes=notes,
        )


def vllm_cells(document: Fields, path: str) -> Iterator[Cell]:
    """Yield the one cell of a result of vLLM's serving benchmark. Raises Malformed."""
    cell = _run_cell(document, Origin(path, "vllm bench serve"), ())
    facts = {
        "requests": _count(document, "num_prompts"),
        "request rate": _rate(document),
        "burstiness": _count(document, "burstiness"),
        "concurrency": _count(document, "max_concurrency"),
    }
    name = ", ".join(f"{what} {value}" for what, value in facts.items() if value and what != "burstiness")
    yield replace(cell, name=name or "serving", facts={what: value for what, value in facts.items() if value})


def is_vllm(document: Fields) -> bool:
    """Say whether an object has what every result of vLLM's serving benchmark has."""
    return all(name in document.plain for name in ("completed", "request_throughput", "total_output_tokens"))


def _origin(path: str, tool: str, fingerprint: Fields | None) -> Origin:
    if fingerprint is None:
        return Origin(path, tool)
    return Origin(path, tool, fingerprint.plain, fingerprint.text("fingerprint_id"))


def _sha256(fingerprint: Fields | None) -> tuple[str, ...]:
    model = None if fingerprint is None else fingerprint.inner("model")
    return () if model is None else tuple(model.texts("sha256"))


def _doubts(document: Fields) -> list[str]:
    return ["it was interrupted: its results are partial"] if document.flag("partial") else []


def _run_cell(run: Fields, origin: Origin, sha256: tuple[str, ...]) -> Cell:
    name = run.text("model_id")
    texts = {what: _load(run) if what == "load" else _plain_text(run, what) for what in _AGREE}
    facts = {what: text for what, text in texts.items() if text}
    order = _order(run)
    lengths = _column(run, "input_lens", len(order))
    unsupported = run.text("unsupported")
    return Cell(
        name=", ".join(facts[what] for what in ("workload", "cache", "load") if what in facts),
        origin=origin,
        model=Model(name, sha256, frozenset({name} if name else ())),
        facts=facts,
        settings={"tokens counted by": run.text("token_source")} if "token_source" in run else {},
        samples={base: (rows,) for base, rows in _samples(run, order) if any(rows)},
        values={name: (value,) for name, value in _values(run)},
        input_lens=tuple(lengths[index] or 0.0 for index in order),
        doubts=(*_doubts(run), *(f"it was disturbed: {why}" for why in run.texts("disturbances"))),
        notes=(f"not supported: {unsupported}",) if unsupported else (),
    )


def _together(rounds: Sequence[Cell]) -> Cell:
    """Return one cell of several rounds of the same."""
    bases = dict.fromkeys(base for each in rounds for base in each.samples)
    names = dict.fromkeys(name for each in rounds for name in each.values)
    return replace(
        rounds[0],
        samples={base: tuple(part for each in rounds for part in each.samples.get(base, ())) for base in bases},
        values={name: tuple(value for each in rounds for value in each.values.get(name, ())) for name in names},
        input_lens=rounds[0].input_lens if len(rounds) == 1 else (),
        doubts=tuple(dict.fromkeys(doubt for each in rounds for doubt in each.doubts)),
    )


def _values(run: Fields) -> Iterator[tuple[str, float]]:
    """Yield every measure that the file has as one number."""
    for base in LATENCIES:
        file_name = LATENCY_FIELDS[base]
        for statistic in STATISTICS:
            value = run.number(f"{statistic}_{file_name}_ms")
            if value is None and statistic == "p50":
                value = run.number(f"median_{file_name}_ms")
            if value is not None:
                yield f"{base}_{statistic}", value
    for name in SCALARS:
        value = run.number(SCALAR_FIELDS.get(name, name))
        if value is None and name == "request_goodput":
            value = run.number("request_goodput:")  # older files of vLLM
        if value is None and name == "error":
            value = _error_share(run)
        if value is not None:
            yield name, value


def _error_share(run: Fields) -> float | None:
    done, failed = run.number("completed"), run.number("failed")
    if done is None or failed is None or done + failed <= 0:
        return None
    return failed / (done + failed)


def _order(run: Fields) -> list[int]:
    """Return the requests in the order in which they were due."""
    n = _n_requests(run)
    starts = _column(run, "start_times", n)
    return sorted(range(n), key=lambda index: starts[index] or 0.0)


def _n_requests(run: Fields) -> int:
    return max(len(run.items(name)) for name in ("input_lens", "output_lens", "ttfts", "latencies", "itls", "errors"))


def _samples(run: Fields, order: Sequence[int]) -> Iterator[tuple[str, Requests]]:
    """Yield the values of each request by latency, in ms, none where it got no answer; then what stands for rates."""
    n = len(order)
    errors = run.items("errors")
    answered = [index >= len(errors) or errors[index] in ("", None) for index in range(n)]
    firsts, lengths, gaps = _column(run, "ttfts", n), _column(run, "output_lens", n), _gaps(run, n)
    ends = _column(run, "latencies", n)
    if not any(ends):
        ends = [_first(first) + sum(row) for first, row in zip(firsts, gaps, strict=True)]
    paces = _column(run, "tpots", n)
    if "tpots" not in run:
        paces = [_pace(first, end, many) for first, end, many in zip(firsts, ends, lengths, strict=True)]
    columns = {"ttft": firsts, "answer_ttft": _column(run, "answer_ttfts", n), "tpot": paces, "e2e": ends}
    columns |= {"queue": _column(run, "server_queue_times", n)}
    for base, column in columns.items():
        # A time of 0 stands for one that is not known; only a queue can be empty.
        found = (column[index] if answered[index] else None for index in order)
        yield base, tuple((1e3 * v,) if v is not None and (v > 0 or base == "queue") else () for v in found)
    yield "itl", tuple(tuple(1e3 * gap for gap in gaps[index]) if answered[index] else () for index in order)
    if len(errors) == n:
        yield "error", tuple((float(not answered[index]),) for index in order)
    good = [index for index in order if answered[index]]
    yield from _windows(run, good, (firsts, ends, lengths))


def _windows(
    run: Fields, order: Sequence[int], columns: tuple[Sequence[float | None], ...]
) -> Iterator[tuple[str, Requests]]:
    """Yield the rates over stretches of equal time of the run: what its throughput is the mean of.

    A request's tokens are spread evenly from its first to its end.
    """
    starts = run.numbers("start_times")
    firsts, ends, lengths = columns
    if len(starts) != len(firsts) or len(order) < _FEWEST_FOR_WINDOWS:
        return
    begun = np.array([starts[i] or 0.0 for i in order])
    end = begun + np.array([ends[i] or 0.0 for i in order])
    first = np.minimum(begun + np.array([_first(firsts[i]) for i in order]), end)
    tokens = np.array([_first(lengths[i]) for i in order])
    edges = np.linspace(float(begun.min()), float(end.max()), _N_WINDOWS + 1)
    width = edges[1] - edges[0]
    if not width > 0:
        return
    share = (edges[:, np.newaxis] - first) / np.maximum(end - first, 1e-9)
    written = (np.clip(share, 0, 1) * tokens).sum(axis=1)
    answered = (np.clip((edges[:, np.newaxis] - begun) / np.maximum(end - begun, 1e-9), 0, 1)).sum(axis=1)
    yield "output_throughput", tuple((float(rate),) for rate in np.diff(written) / width)
    yield "request_throughput", tuple((float(rate),) for rate in np.diff(answered) / width)


def _column(run: Fields, name: str, n: int) -> list[float | None]:
    values = run.numbers(name)
    if values and len(values) != n:
        raise Malformed(run.at(name), f"{len(values)} entries where others have {n}")
    return values or [None] * n


def _gaps(run: Fields, n: int) -> list[list[float]]:
    rows = run.items("itls")
    if rows and len(rows) != n:
        raise Malformed(run.at("itls"), f"{len(rows)} entries where others have {n}")
    return [_row(row, f"{run.at('itls')}[{index}]") for index, row in enumerate(rows)] or [[] for _ in range(n)]


def _row(row: Any, place: str) -> list[float]:
    if not isinstance(row, list):
        raise Malformed(place, "something else where a list of times should be")
    return [gap for gap in optional_numbers(row, place) if gap is not None]


def _first(value: float | None) -> float:
    return value or 0.0


def _pace(first: float | None, end: float | None, n_tokens: float | None) -> float | None:
    if not first or not end or not n_tokens or n_tokens < 2:
        return None
    return (end - first) / (n_tokens - 1)


def _load(run: Fields) -> str:
    load = run.inner("load")
    if load is None:
        return ""
    concurrency, shape = load.number("concurrency"), load.number("shape")
    return str(Load(None if concurrency is None else int(concurrency), load.number("rate_per_s"), shape or 1.0))


def _plain_text(run: Fields, name: str) -> str:
    value = run.plain.get(name)
    return f"{value}" if isinstance(value, int) else run.text(name)


def _count(run: Fields, name: str) -> str:
    value = run.number(name)
    return "" if value is None else f"{value:g}"


def _rate(run: Fields) -> str:
    value = run.plain.get("request_rate")
    return value if isinstance(value, str) else _count(run, "request_rate")
