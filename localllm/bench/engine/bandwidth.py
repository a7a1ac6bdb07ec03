"""Measures how fast this machine reads memory, and counts the bytes that one decoded token reads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from localllm.bench.stats.summaries import Estimate, estimate
from localllm.models.info import ModelInfo

MIN_PROBE_BYTES = 256 << 20
MAX_PROBE_BYTES = 2 << 30
LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")


def last_cache_bytes(folder: Path = LAST_CACHE) -> int:
    """Return the size of the largest cache of a core; 0 where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [0]
    for path in sorted(folder.glob("index*/size")):
        try:
            text = path.read_text(encoding="ascii").strip()
            found.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
        except (OSError, ValueError):
            continue
    return max(found)


def probe_bytes(cache_bytes: int, available_bytes: int) -> int:
    """Return how much to read: four times the last cache, at most a quarter of what is free."""
    wanted = min(max(4 * cache_bytes, MIN_PROBE_BYTES), MAX_PROBE_BYTES)
    return max(1 << 20, min(wanted, available_bytes // 4))


def read_bandwidth(n_threads: int, n_bytes: int, *, n_reps: int = 7) -> Estimate:
    """Measure sequential reading by `n_threads` threads over `n_bytes` of memory, in bytes a second.

    Each thread takes the maximum of its share of an array: vectorised, no writes, and without
    Python's lock. The memory is touched before the first repetition is timed.
    """
    import numpy as np

    values = np.ones(max(n_bytes // 4, n_threads), dtype=np.int32)
    shares = np.array_split(values, n_threads)
    speeds = []
    with ThreadPoolExecutor(n_threads) as pool:
        for rep in range(n_reps + 1):
            start = time.perf_counter()
            list(pool.map(np.max, shares))
            if rep:
                speeds.append(values.nbytes / (time.perf_counter() - start))
    return estimate(speeds)


def weight_bytes_per_token(info: ModelInfo) -> int:
    """Return the bytes of weights that one decoded row reads.

    Every tensor once, except: a table of embeddings that is not also the output layer (one row
    of it is read), and experts, of which only the chosen share is read.
    """
    separate_output = any(tensor.name == "output.weight" for tensor in info.tensors)
    total = 0.0
    for tensor in info.tensors:
        is_table = tensor.name.startswith("per_layer_token_embd") or (
            tensor.name == "token_embd.weight" and separate_output
        )
        if is_table:
            total += tensor.n_bytes / max(1, tensor.shape[-1])
        elif "_exps." in tensor.name and info.n_expert:
            total += tensor.n_bytes * min(1.0, info.n_expert_used / info.n_expert)
        else:
            total += tensor.n_bytes
    return round(total)
