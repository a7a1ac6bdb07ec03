"""Writes a benchmark as Markdown, JSON, JSON lines or CSV; rows in llama-bench's names and order."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

from localllm.bench.engine.markdown import markdown
from localllm.bench.engine.report import Report
from localllm.bench.engine.rows import FIELDS, Row

Format: TypeAlias = Literal["md", "json", "jsonl", "csv"]
VERSION = 1


def render(report: Report, form: Format) -> str:
    """Return the report in one format, with its last line ended."""
    match form:
        case "json":
            return json.dumps(document(report), indent=2) + "\n"
        case "jsonl":
            return "".join(json.dumps(row.document()) + "\n" for row in report.rows)
        case "csv":
            return _csv(report.rows)
        case "md":
            return markdown(report)


def document(report: Report) -> dict[str, Any]:
    """Return the JSON form: the summary's figures, the rows with their samples, the machine."""
    return {
        "localllm_bench": VERSION,
        "partial": report.partial,
        **report.summary(),
        "bandwidth_bytes_per_s": asdict(report.bandwidth) if report.bandwidth else None,
        "help_s": asdict(report.help_s) if report.help_s else None,
        "notes": list(report.notes),
        "method": dict(report.method),
        "fingerprint": dict(report.fingerprint),
        "rows": [row.document() for row in report.rows],
    }


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in row.flat().items()})
    return out.getvalue()
