"""A benchmark as Markdown: llama-bench's table, then what was measured against a bare loop and script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from localllm.bench.engine.report import Report
from localllm.bench.engine.rows import Row
from localllm.bench.stats.summaries import mean, stdev

Line: TypeAlias = tuple[str, ...]


def markdown(report: Report) -> str:
    """Return the report as two tables and a line for each thing left out; "" where there is nothing."""
    rates = [row for row in report.rows if row.is_rate and "overhead_ratio" not in row.extras]
    against = [line for row in report.rows for line in _against(row)] + list(_machine(report))
    parts = [_table(_columns(rates))] if rates else []
    if against:
        head = ("measured", "value", "95 % interval", "against")
        parts.append(_table([(name, *cells) for name, *cells in zip(head, *against, strict=True)]))
    parts += [f"left out: {note}" for note in report.notes]
    if report.partial:
        parts.append("partial: interrupted; a row marked * has fewer repetitions than asked for")
    return "\n\n".join(parts) + "\n" if parts else ""


def _columns(rows: Sequence[Row]) -> list[Line]:
    """Return the columns of the table of rates, each with its heading; as in llama-bench only those that tell."""
    facts = [row.facts for row in rows]
    columns: list[Line] = [
        ("model", *(f.model_type for f in facts)),
        ("size", *(size_text(f.model_size) for f in facts)),
        ("params", *(params_text(f.model_n_params) for f in facts)),
        ("backend", *(f.backends for f in facts)),
    ]
    if any(f.n_gpu_layers for f in facts):
        columns.append(("ngl", *(str(f.n_gpu_layers) for f in facts)))
    else:
        columns.append(("threads", *(str(f.n_threads) for f in facts)))
    if any((f.type_k, f.type_v) != ("f16", "f16") for f in facts):
        columns += [("type_k", *(f.type_k for f in facts)), ("type_v", *(f.type_v for f in facts))]
    if any(row.case.n_parallel > 1 for row in rows):
        columns.append(("n_parallel", *(str(row.case.n_parallel) for row in rows)))
    columns.append(("test", *(row.case.single_name + _mark(row) for row in rows)))
    columns.append(("t/s", *(f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}" for row in rows)))
    return columns


def _against(row: Row) -> Iterator[Line]:
    """Yield the lines of a row's comparisons: measured, value, interval, against."""
    flat = row.flat()
    if flat["overhead_ratio"] is not None:
        n = row.case.n_parallel
        name = f"decode speed, {n} sequence{'s' if n > 1 else ''}{_mark(row)}"
        yield _ratio(name, flat, "overhead_ratio", f"the bare loop over the C API ({flat['bare_avg_ts']:.2f} t/s)")
    if flat["bandwidth_share"] is not None:
        read = f"{flat['bytes_per_token'] / 1e6:.1f} MB a token"
        yield f"memory read, {row.case.name}{_mark(row)}", read, "", f"{flat['bandwidth_share']:.0%} of the bandwidth"
    if flat["start_ratio"] is not None:
        ours_s, spread_s = mean(row.samples_ns) / 1e9, stdev(row.samples_ns) / 1e9
        bare = f"a bare script over the bindings ({flat['bare_avg_ns'] / 1e9:.2f} s)"
        above = (flat["peak_rss_bytes"] - flat["bare_peak_rss_bytes"]) / 1e6
        yield f"process start to first token{_mark(row)}", f"{ours_s:.2f} ± {spread_s:.2f} s", "", ""
        yield _ratio("process start to first token, ratio", flat, "start_ratio", bare)
        where = f"{abs(above):.0f} MB {'above' if above >= 0 else 'below'} the bare script"
        yield "peak resident memory", f"{flat['peak_rss_bytes'] / 1e6:.0f} MB", "", where


def _machine(report: Report) -> Iterator[Line]:
    if report.bandwidth:
        found = report.bandwidth
        spread = f"{found.low / 1e9:.1f} to {found.high / 1e9:.1f}"
        yield "memory bandwidth, reading", f"{found.median / 1e9:.1f} GB/s", spread, ""
    if report.help_s:
        found = report.help_s
        yield "localllm --help", f"{found.median:.2f} s", f"{found.low:.2f} to {found.high:.2f}", ""


def _ratio(name: str, flat: Mapping[str, Any], field: str, against: str) -> Line:
    return name, f"{flat[field]:.3f}", f"{flat[f'{field}_low']:.3f} to {flat[f'{field}_high']:.3f}", against


def _mark(row: Row) -> str:
    return " *" if row.partial else ""


def _table(columns: Sequence[Line]) -> str:
    """Lay out columns, each with its heading first: the first to the left, the others to the right."""
    laid = []
    for i, column in enumerate(columns):
        width = max(map(len, column))
        rule = "-" * width if i == 0 else "-" * (width - 1) + ":"
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for cell in column]
        laid.append([cells[0], rule, *cells[1:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*laid, strict=True))


def size_text(n_bytes: int) -> str:
    """Return bytes as llama-bench writes them: MiB, from 1 GiB on GiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def params_text(n_params: int) -> str:
    """Return a number of parameters as llama-bench writes it: millions, from 10^9 on billions."""
    return f"{n_params / 1e9:.2f} B" if n_params >= 1e9 else f"{n_params / 1e6:.2f} M"
