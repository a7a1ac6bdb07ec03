"""Drives the engine by token ids on tiny random models, where a wrong KV cell shows in the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings, ModelSettings
from localllm.models.info import read_info
from localllm.runtime.engine import Batch, BatchItem

Logits = NDArray[np.float32]

EXACT = 1e-3  # F32 KV, flash attention off: drift is below 1.5e-5
SHIPPED = 5e-2  # f16 KV, flash attention on
WRONG = 0.15  # a wrong block moves the logits by 0.2 to 16

_RANDOM = np.random.default_rng(5)
TEXT = [int(token) for token in _RANDOM.integers(0, 128, 600)]
OTHER = [int(token) for token in _RANDOM.integers(0, 128, 600)]


def settings(**changes: Any) -> ContextSettings:
    """Return settings whose drift is tiny: F32 KV, flash attention off."""
    values: dict[str, Any] = {
        "n_ctx": 1024,
        "n_slots": 6,
        "n_batch": 256,
        "n_ubatch": 128,
        "kv_k": "f32",
        "kv_v": "f32",
        "flash_attn": "off",
        "n_rs_seq": 4,
    }
    return ContextSettings(**{**values, **changes})


SHIPPED_SETTINGS: dict[str, Any] = {"kv_k": "f16", "kv_v": "f16", "flash_attn": "on"}


def open_model(path: Path) -> LlamaModel:
    """Load one GGUF file."""
    return LlamaModel.load(read_info(path), ModelSettings())


@contextmanager
def opened(path: Path, **changes: Any) -> Iterator[LlamaEngine]:
    """Open an engine on one file for the length of a test."""
    engine = LlamaEngine(open_model(path), settings(**changes))
    try:
        yield engine
    finally:
        engine.close()


def rows(slot: int, start: int, tokens: list[int], n_logits: int = 1) -> BatchItem:
    """Return one slot's rows."""
    return BatchItem(slot, start, tokens, n_logits)


def forward(engine: LlamaEngine, *items: BatchItem) -> Logits:
    """Run one forward and return a copy of its logits."""
    return engine.forward(Batch(items)).logits.copy()


def feed(engine: LlamaEngine, slot: int, tokens: list[int], start: int = 0, chunk: int = 64) -> Logits:
    """Run `tokens` in chunks and return the last row of logits."""
    last = None
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        last = forward(engine, rows(slot, start + at, part))
    assert last is not None
    return last[-1]


def apart(one: Logits, other: Logits) -> float:
    """Return the largest difference of two rows of logits."""
    return float(np.abs(one - other).max())
