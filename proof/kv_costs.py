"""What moving KV costs on this machine, piece by piece: `python -m proof.kv_costs MODEL`.

One JSON document on stdout: medians over rounds that take the pieces in turn. "From page cache" is read, checksum
and set, block by block, of files that were just written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from localllm import compose
from localllm.backends import registry
from localllm.backends.placement import place
from localllm.runtime.config import LoadConfig
from localllm.runtime.engine import Batch, BatchItem, Clear, EditOutcome, Engine, Restore

N_TOKENS, BLOCK_TOKENS, N_ROUNDS = 1024, 64, 9


def opened(model: str, n_tokens: int, *, deterministic: bool) -> Engine:
    """Return an engine with room for twice `n_tokens`."""
    found, info = compose.find(model)
    wishes = LoadConfig(ctx=2 * n_tokens, parallel=1, deterministic=deterministic)
    placement = place(info, registry.machine(), wishes)
    return registry.open_engine(registry.load_model(info, placement, found.sha256 or ""), placement)


def costs(engine: Engine, n_tokens: int, folder: Path, n_rounds: int = N_ROUNDS) -> dict[str, float]:
    """Return what each piece costs: milliseconds per 1 000 tokens, and gigabytes per second."""
    _fill(engine, 0, n_tokens)
    spans = [(start, start + BLOCK_TOKENS) for start in range(0, n_tokens, BLOCK_TOKENS)]
    blobs = [engine.export(0, start, end) for start, end in spans]
    files = [folder / f"{start}.kv" for start, _ in spans]
    for file, blob in zip(files, blobs, strict=True):
        file.write_bytes(blob)
    n_bytes = sum(map(len, blobs))
    pieces: dict[str, Callable[[], None]] = {
        "export": lambda: _export(engine, spans),
        "restore": lambda: _restore(engine, spans, blobs),
        "from_page_cache": lambda: _restore(engine, spans, [file.read_bytes() for file in files]),
    }
    took: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(n_rounds):
        for name, piece in pieces.items():
            began_s = time.perf_counter()
            piece()
            took[name].append(time.perf_counter() - began_s)
    told: dict[str, float] = {"n_tokens": n_tokens, "bytes_per_token": n_bytes / n_tokens}
    for name, times in took.items():
        told[f"{name}_ms_per_1000_tokens"] = round(median(times) * 1e6 / n_tokens, 3)
        told[f"{name}_gb_per_s"] = round(n_bytes / 1e9 / median(times), 3)
    return told


def _fill(engine: Engine, slot: int, n_tokens: int) -> None:
    size = engine.spec.cut_tokens or BLOCK_TOKENS
    for start in range(0, n_tokens, size):
        rows = tuple(1 + n % 97 for n in range(start, min(n_tokens, start + size)))
        engine.forward(Batch((BatchItem(slot, start, rows, 0),)))


def _export(engine: Engine, spans: Sequence[tuple[int, int]]) -> None:
    for start, end in spans:
        engine.export(0, start, end)


def _restore(engine: Engine, spans: Sequence[tuple[int, int]], blobs: Sequence[bytes]) -> None:
    """Put all blocks into an empty slot. Raises RuntimeError where the engine refuses one."""
    edits = [Restore(1, start, blob) for (start, _), blob in zip(spans, blobs, strict=True)]
    _, *results = engine.edit((Clear(1), *edits))
    if any(result.outcome is not EditOutcome.OK for result in results):
        raise RuntimeError("a block was refused")


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(prog="python -m proof.kv_costs", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=N_TOKENS)
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    n_tokens = -(-asked.tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    engine = opened(asked.model, n_tokens, deterministic=asked.deterministic)
    try:
        with tempfile.TemporaryDirectory() as folder:
            json.dump({"model": asked.model, **costs(engine, n_tokens, Path(folder))}, sys.stdout, indent=1)
            sys.stdout.write("\n")
    finally:
        engine.close()


if __name__ == "__main__":
    main()
