"""Quantised KV keeps what the model knows: perplexity of a fixed text on the engine's own logits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.runtime.engine import Batch
from tests.backends.llamacpp.lanes import opened, rows

PROSE = Path(__file__).with_name("prose.txt").read_text(encoding="utf-8")
N_TOKENS = 512
CHUNK = 64


def perplexity(engine: LlamaEngine, tokens: list[int]) -> float:
    """Return exp of the mean negative log-likelihood of tokens[1:] given what stands before each."""
    total = 0.0
    for start in range(0, len(tokens) - 1, CHUNK):
        part = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        logits = engine.forward(Batch((rows(0, start, part, len(part)),))).logits.astype(np.float64)
        top = logits.max(axis=1)
        spread = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        following = tokens[start + 1 : start + 1 + len(part)]
        total += float((spread - logits[np.arange(len(part)), following]).sum())
    return math.exp(total / (len(tokens) - 1))


def measured(model: Path, k: str, v: str) -> float:
    with opened(model, n_ctx=1024, n_slots=2, n_batch=CHUNK, n_ubatch=CHUNK, kv_k=k, kv_v=v, flash_attn="on") as engine:
        tokens = engine.tokenizer.encode(PROSE, parse_special=False, add_bos=True)[:N_TOKENS]
        assert len(tokens) == N_TOKENS
        return perplexity(engine, tokens)


@pytest.mark.real
def test_q8_0_keeps_the_perplexity_of_f16_and_q4_0_does_not(smollm2: Path) -> None:
    exact = measured(smollm2, "f16", "f16")
    assert 5 < exact < 100  # prose it never saw: a broken cache gives thousands
    assert measured(smollm2, "q8_0", "q8_0") == pytest.approx(exact, rel=0.01)
    assert measured(smollm2, "q4_0", "q4_0") > 1.01 * exact  # the control: a coarse cache shows
