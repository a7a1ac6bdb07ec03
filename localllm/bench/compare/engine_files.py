"""Reads what measures an engine by itself: our `bench engine` and llama-bench, whose rows have the same fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from localllm.bench.compare.cell import Cell, Model, Origin, rate_of_test, time_of_test
from localllm.bench.compare.fields import Fields, Malformed
from localllm.bench.engine.rows import Case
from localllm.bench.machine.fingerprint import fingerprint_id

SETTINGS = tuple(
    """
    build_commit backends n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe
    split_mode main_gpu no_kv_offload flash_attn devices tensor_split tensor_buft_overrides load_mode use_mmap
    use_direct_io lazy_mode embeddings no_op_offload no_host repack
    """.split()  # noqa: SIM905
)
_LONGEST = 1_000_000_000  # tokens of a test


def engine_cells(document: Fields, path: str) -> Iterator[Cell]:
    """Yield a cell for each row of our document. Raises Malformed."""
    fingerprint = document.inner("fingerprint")
    origin = Origin(path, "bench engine")
    sha256: tuple[str, ...] = ()
    if fingerprint is not None:
        found = fingerprint.text("fingerprint_id") or _id_of(fingerprint)
        origin = Origin(path, "bench engine", fingerprint.plain, found)
        model = fingerprint.inner("model")
        sha256 = () if model is None else tuple(model.texts("sha256"))
    doubts = ("it was interrupted: its results are partial",) if document.flag("partial") else ()
    for row in document.objects("rows"):
        yield _row_cell(row, origin, sha256, doubts)


def llama_bench_cells(rows: Sequence[Fields], path: str) -> Iterator[Cell]:
    """Yield a cell for each row that llama-bench wrote. Raises Malformed."""
    for row in rows:
        yield _row_cell(row, Origin(path, "llama-bench"), (), ())


def is_row(document: Fields) -> bool:
    """Say whether an object has what every row of llama-bench has."""
    return all(name in document.plain for name in ("n_prompt", "n_gen", "avg_ts"))


def _id_of(fingerprint: Fields) -> str:
    """Return the identity of a machine that an older file tells of without naming it."""
    machine = fingerprint.inner("machine")
    if machine is None:
        return ""
    try:
        return fingerprint_id(fingerprint.plain)
    except (TypeError, ValueError, AttributeError):
        raise Malformed(fingerprint.at("machine"), "no description of a machine") from None


def _row_cell(row: Fields, origin: Origin, sha256: tuple[str, ...], doubts: tuple[str, ...]) -> Cell:
    name = row.text("test") or _test(row)
    machine = ", ".join(text for text in (row.text("cpu_info"), row.text("gpu_info")) if text)
    origin = Origin(origin.path, origin.tool, origin.fingerprint, origin.fingerprint_id, machine)
    rates = [value for value in row.numbers("samples_ts") if value is not None]
    times = [value / 1e6 for value in row.numbers("samples_ns") if value is not None]
    rate = row.number("avg_ts")
    of = time_of_test(name) if rate is None and not rates and times else rate_of_test(name)
    samples = times if of == time_of_test(name) else rates
    partial = ("it was interrupted: its results are partial",) if row.flag("partial") else ()
    return Cell(
        name=name,
        origin=origin,
        model=_model(row, sha256),
        settings={field: f"{row.plain[field]}" for field in SETTINGS if field in row},
        samples={name: (tuple((value,) for value in samples),)} if samples else {},
        values={} if samples or rate is None else {name: (rate,)},
        tests={name: of},
        doubts=tuple(dict.fromkeys((*doubts, *partial))),
    )


def _test(row: Fields) -> str:
    n_prompt, n_gen, n_depth = (_n_tokens(row, field) for field in ("n_prompt", "n_gen", "n_depth"))
    return Case(n_prompt, n_gen, n_depth).name or "nothing"


def _n_tokens(row: Fields, field: str) -> int:
    value = row.number(field) or 0.0
    if not 0 <= value <= _LONGEST:
        raise Malformed(row.at(field), "no number of tokens")
    return int(value)


def _model(row: Fields, sha256: tuple[str, ...]) -> Model:
    file = PurePath(row.text("model_filename").replace("\\", "/")).name
    kind, n_bytes, n_params = row.text("model_type"), row.number("model_size"), row.number("model_n_params")
    keys = [f"{n_bytes:g} {n_params:.0f}"] if n_bytes and n_params else []
    if file:
        keys.append(f"{file} {kind} {n_params}")
    return Model(file or kind, sha256, frozenset(keys))
