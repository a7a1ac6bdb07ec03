"""What every proof run writes: its figures, and the machine that they were taken on."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localllm.bench.machine import fingerprint
from localllm.models.info import read_info
from localllm.models.resolve import resolve

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "measured"


def header(run: str, model: Path | None, **settings: Any) -> dict[str, Any]:
    """Return who, where and what: the first thing of every result."""
    found: dict[str, Any] = {"machine": fingerprint.machine(), "software": fingerprint.software()}
    return {
        "run": run,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine_line": fingerprint.machine_line(found),
        "git": found["software"]["git"],
        "python": found["software"]["python"],
        "governor": found["machine"]["governor"],
        "load_average": fingerprint.load_average(),
        "model": None if model is None else _model(model),
        "settings": settings,
    }


def _model(path: Path) -> dict[str, Any]:
    """Return which file it was; its name alone, folders are the user's business."""
    info = read_info(path)
    facts = fingerprint.model(info)
    return {"file": path.name, **facts}


def model_path(model: str) -> Path:
    """Return the file that a reference names. Raises ModelNotFound."""
    return resolve(model).path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one document, whole or not at all."""
    write_lines(path, [value], indent=1)


def write_lines(path: Path, values: Iterable[Mapping[str, Any]], indent: int | None = None) -> None:
    """Write JSON documents, one a line, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = "".join(json.dumps(value, indent=indent) + "\n" for value in values)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def run_measured(output: Path, head: dict[str, Any], measure: Callable[[Path, dict[str, Any]], None]) -> int:
    """Measure into a document and write it, as a partial one where that breaks off; return the exit code.

    `measure` gets a folder that goes afterwards, and the document to fill; each of its `figures` says whether it
    was `reached`.
    """
    found: dict[str, Any] = {}
    is_whole = False
    try:
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            measure(Path(folder), found)
        is_whole = True
    finally:
        after = {"load_average_after": fingerprint.load_average(), "partial": not is_whole}
        write_json(output if is_whole else output.with_suffix(".partial.json"), head | found | after)
    tell(f"{output}")
    return 0 if all(line["reached"] for line in found["figures"]) else 1


def tell(text: str) -> None:
    """Say how far a run is."""
    print(text, file=sys.stderr, flush=True)


def rounded(value: float | None, digits: int = 1) -> float | None:
    """Return a figure as it is worth reading."""
    return None if value is None else round(value, digits)
