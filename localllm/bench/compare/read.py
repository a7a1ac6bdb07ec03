"""Reads result files into cells: ours, contracts', llama-bench's and vLLM's, told apart by what is in them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from localllm.bench.compare.cell import Cell
from localllm.bench.compare.engine_files import engine_cells, is_row, llama_bench_cells
from localllm.bench.compare.fields import Fields, Malformed
from localllm.bench.compare.serving_files import contract_cells, is_vllm, serve_cells, vllm_cells
from localllm.errors import UsageError

LARGEST_BYTES = 256 << 20
_OURS = {
    "localllm_bench_serve": serve_cells,
    "localllm_bench_contract": contract_cells,
    "localllm_bench": engine_cells,
}
_VERSION = 1
_KNOWN = "it takes results of localllm bench (serve, run, engine), llama-bench -o json|jsonl and vllm bench serve"


def read_results(path: Path) -> list[Cell]:
    """Return every cell of a result file. Raises UsageError with the file and the place in it."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"{error}"
        raise UsageError(f"{path}: {why}.", "localllm bench compare OLD.json NEW.json") from None
    return cells_of(data, str(path))


def cells_of(data: bytes, name: str) -> list[Cell]:
    """Return every cell of the content of a result file called `name`. Raises UsageError."""
    if len(data) > LARGEST_BYTES:
        raise UsageError(f"{name}: it is larger than {LARGEST_BYTES >> 20} MiB.", _KNOWN)
    try:
        cells = list(_cells(data.removeprefix(codecs.BOM_UTF8), name))
    except Malformed as error:
        place = f" at {error.place}" if error.place else ""
        raise UsageError(f"{name}: {error.what}{place}.", _KNOWN) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{name}: not JSON: {error}.", _KNOWN) from None
    except RecursionError:
        raise UsageError(f"{name}: it is nested too deeply.", _KNOWN) from None
    if not cells:
        raise UsageError(f"{name}: there are no results in it.", _KNOWN)
    return cells


def cells_of_document(document: Mapping[str, Any], name: str) -> list[Cell]:
    """Return every cell of a result that was not read from a file. Raises UsageError."""
    try:
        return list(_of_document(Fields(document), name))
    except Malformed as error:
        raise UsageError(f"{error.what} at {error.place or 'its top'}.", _KNOWN) from None


def _cells(data: bytes, name: str) -> Iterator[Cell]:
    if not data.strip():
        raise Malformed("", "the file is empty")
    documents = _documents(data)
    found = [Fields(value, place) for place, value in documents]
    rows = [one for one in found if is_row(one) and not _mark(one)]
    if rows and len(rows) == len(found):
        yield from llama_bench_cells(rows, name)
        return
    for one in found:
        yield from _of_document(one, name)


def _of_document(document: Fields, name: str) -> Iterator[Cell]:
    mark = _mark(document)
    if not mark:
        if not is_vllm(document):
            raise Malformed("", "no result of a benchmark that is known here")
        return vllm_cells(document, name)
    version = document.plain[mark]
    if isinstance(version, bool) or not isinstance(version, int):
        raise Malformed(mark, "no version")
    if version != _VERSION:
        raise Malformed(mark, f"version {version} of the format, of which this localllm knows {_VERSION}")
    return _OURS[mark](document, name)


def _mark(document: Fields) -> str:
    return next((mark for mark in _OURS if mark in document.plain), "")


def _documents(data: bytes) -> Sequence[tuple[str, Any]]:
    """Return the objects of a JSON array, of JSON lines, or the one that the file is, each with its place."""
    try:
        whole = msgspec.json.decode(data)
    except msgspec.DecodeError:
        lines = [(f"line {n}", line) for n, line in enumerate(data.splitlines(), start=1) if line.strip()]
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise
        return [(place, _line(line, place)) for place, line in lines]
    if isinstance(whole, list):
        return [(f"[{index}]", value) for index, value in enumerate(whole)]
    return [("", whole)]


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except msgspec.DecodeError:
        return False
    return True


def _line(data: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Malformed(place, f"not JSON: {error}") from None
