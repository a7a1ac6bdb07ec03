"""Goldens of a real model: it is unmoved, with the same settings to the last digit, and moves where it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm import compose
from localllm.bench.goldens import golden
from localllm.bench.goldens.checking import Move
from localllm.bench.goldens.golden import Bench, check, record
from localllm.bench.goldens.prompts import PROMPTS
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.service import Service

FEW = tuple(prompt for prompt in PROMPTS if prompt.name in ("code, plain", "digits"))


class OneThread:
    """`compose` with one thread, and what else a test wants of the load."""

    def __init__(self, **wishes: Any) -> None:
        self._wishes = wishes

    def find(self, model: str, /) -> Any:
        """As compose."""
        return compose.find(model)

    def open(self, model: str, config: LoadConfig, /, *, runtime: RuntimeConfig) -> Service:
        """As compose, with these wishes."""
        return compose.open(model, replace(config, threads=1, **self._wishes), runtime=runtime)


@pytest.mark.real
def test_a_real_model_is_unmoved_and_moves_with_a_coarser_cache(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "PROMPTS", FEW)
    record(str(smollm2), Bench(OneThread()))
    same = check(str(smollm2), Bench(OneThread()))
    assert not same.has_moved
    assert [prompt.drift_nats for prompt in same.prompts] == [0.0] * len(FEW)
    assert same.stale == ()
    coarser = check(str(smollm2), Bench(OneThread(kv=KvTypes.parse("q4_0"))))
    assert {move for prompt in coarser.prompts for move in prompt.moves} == {Move.TEXT, Move.LOGPROBS}
    assert set(coarser.settings) >= {"type_k: f16, now q4_0", "type_v: f16, now q4_0"}
