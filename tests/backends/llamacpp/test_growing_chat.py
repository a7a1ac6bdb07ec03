"""A chat of 20 turns on SmolLM2: each turn computes only its new tokens, however oddly its answers were tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.runtime.stream import collect
from localllm.runtime.types import ChatRequest, GenerationOptions

N_TURNS = 20
UNTRUNCATED = {"min_p": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_each_turn_computes_only_its_new_tokens(smollm2: Path, temperature: float) -> None:
    messages: list[dict[str, Any]] = []
    n_held, n_drifts = 0, 0
    with localllm.open(smollm2, ctx=2048, threads=1) as service:
        for turn in range(N_TURNS):
            messages.append({"role": "user", "content": f"Tell me something odd about the number {turn}."})
            options = GenerationOptions(max_tokens=16, seed=turn, sampling={**UNTRUNCATED, "temperature": temperature})
            answer = collect(service.submit(ChatRequest(tuple(messages), options)))
            usage = answer.usage
            n_computed = usage.prompt_tokens - sum(usage.cached_tokens.values())
            assert n_computed <= usage.prompt_tokens - n_held + 1, turn
            ids = [token for token in answer.choices[0].ids if token not in service.tokenizer.vocabulary.eog_ids]
            n_held = usage.prompt_tokens + len(ids)
            usual = service.tokenizer.encode(answer.text, parse_special=False, continues=True)
            n_drifts += usual != ids
            messages.append({"role": "assistant", "content": answer.text})
    assert n_drifts > 0 or not temperature  # else it was no test of that
