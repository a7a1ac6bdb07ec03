"""A window cache whose prefix is shared: long chunks give what short ones give."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localllm.backends import registry
from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.placement import place
from localllm.models.info import read_info
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig
from localllm.runtime.engine import Batch, BatchItem, CopyPrefix
from localllm.runtime.stream import collect
from tests.runtime.harness import Bench


def _engine(path: Path, *, parallel: int, retained: int, n_ctx: int = 1280, n_ubatch: int = 32) -> LlamaEngine:
    info = read_info(path)
    config = LoadConfig(
        ctx=256, kv=KvTypes("f32", "f32"), flash_attn="off", gpu="off", threads=1, parallel=parallel, retained=retained
    )
    placement = place(info, registry.machine(), config)
    settings = replace(
        registry.context_settings(placement), n_ctx=n_ctx, max_sequence_tokens=n_ctx, n_batch=512, n_ubatch=n_ubatch
    )
    return LlamaEngine(registry.load_model(info, placement), settings)


def _last_logits(path: Path, tokens: list[int], *, share_first: int) -> np.ndarray:
    engine = _engine(path, parallel=2, retained=0)
    try:
        start = 0
        while start < len(tokens):
            n_rows = engine.spec.max_batch_tokens
            if start < share_first:
                n_rows = min(n_rows, share_first - start)
            part = tokens[start : start + n_rows]
            output = engine.forward(Batch((BatchItem(1, start, part, 1),)))
            start += len(part)
            if start == share_first:
                engine.edit([CopyPrefix(1, 0, share_first)])
        return output.logits[0].copy()
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["gemma3-dense", "gpt-oss-moe"])
def test_a_shared_prefix_keeps_its_window_through_a_long_chunk(tiny: Path, name: str) -> None:
    rng = random.Random(12)
    tokens = [rng.randint(3, 127) for _ in range(604)]
    path = tiny / f"{name}.gguf"
    shared = _last_logits(path, tokens, share_first=69)
    alone = _last_logits(path, tokens, share_first=0)
    assert np.abs(shared - alone).max() < 1e-3


def test_sequences_that_share_more_than_a_window_cache_holds_come_to_an_end(tiny: Path) -> None:
    """Shared window cells are never reused by llama.cpp: NoRoom, though the ledger sees free cells."""
    rng = random.Random(1)
    engine = _engine(tiny / "gemma3-dense.gguf", parallel=4, retained=0, n_ctx=2048)
    bench = Bench(engine)  # type: ignore[arg-type]
    refused = 0
    forward = engine.forward

    def counted(batch: Batch) -> object:
        nonlocal refused
        try:
            return forward(batch)
        except Exception:
            refused += 1
            raise

    engine.forward = counted  # type: ignore[method-assign,assignment]
    try:
        prompt = [rng.randint(3, 127) for _ in range(300)]
        streams = [bench.submit([*prompt, 5 + i], max_tokens=200, ignore_eos=True) for i in range(4)]
        bench.run(at_most=3000)
        assert refused > 0
        assert [len(collect(s).choices[0].ids) for s in streams] == [200] * 4
    finally:
        engine.close()
