"""What is kept on the device, in RAM and on disk gives the answers of an empty cache, on real engines.

Kernels drift with the rows of a forward, so logits are compared within what that makes; a wrong block is far
outside. Bit for bit, in another mode: test_deterministic.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm.compose import open as open_model
from localllm.models import hashes
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.service import Service
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.backends.llamacpp.lanes import SHIPPED, WRONG
from tests.tiny_models import TINY

STEM = tuple(2 + 37 * n % 120 for n in range(150))
PROMPTS = (STEM, STEM[:1], (*STEM[:100], 9, 8, 7), tuple(reversed(STEM)), (*STEM, *STEM[:60:2]))
DRIFT = 2 * SHIPPED  # of a logarithm of a probability: the sum over all moves as well


@contextmanager
def service(path: Path, disk: Path) -> Iterator[Service]:
    """Open a model that keeps one answer's KV on the device."""
    tiers = TierConfig(ram_bytes=1 << 27, disk_dir=str(disk), disk_bytes=1 << 29, keeps_all=True, flush_s=60)
    opened = open_model(path, LoadConfig(ctx=256, threads=2), runtime=RuntimeConfig(tiers=tiers))
    try:
        yield opened
    finally:
        opened.close()


def scores(opened: Service, prompt: Sequence[int]) -> tuple[dict[int, float], dict[str, int]]:
    """Return the best tokens after a prompt with the logarithms of their probabilities, and what was cached."""
    options = GenerationOptions(max_tokens=1, sampling={"temperature": 0.0}, logprobs=20, ignore_eos=True)
    answer = collect(opened.submit(CompletionRequest(tuple(prompt), options)))
    [entry] = answer.choices[0].logprobs
    return {top.id: top.logprob for top in entry.top}, dict(answer.usage.cached_tokens)


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest difference of those of the ten best that both know."""
    best = sorted(one, key=one.__getitem__, reverse=True)[:10]
    return max((abs(one[token] - other[token]) for token in best if token in other), default=99.0)


def cold_scores(path: Path, folder: Path, prompts: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """Return the scores after each prompt of a service that nothing was asked before."""
    cold = []
    for n, prompt in enumerate(prompts):
        with service(path, folder / f"cold{n}") as opened:
            told, cached = scores(opened, prompt)
            assert cached == {"device": 0}
            cold.append(told)
    return cold


def hold(path: Path, folder: Path, prompts: Sequence[Sequence[int]], drift: float) -> None:
    """Hold answers that find something against those that find nothing."""
    cold = cold_scores(path, folder, prompts)
    [other] = cold_scores(path, folder / "other", [[*prompts[0][:-12], *prompts[3][-12:]]])
    assert apart(cold[0], other) > WRONG  # the control: other tokens show
    with service(path, folder / "kept") as opened:
        for _ in range(3):  # one is kept on the device: the others come from RAM
            found = [scores(opened, prompt) for prompt in prompts]
            assert max(apart(one, told) for one, (told, _) in zip(cold, found, strict=True)) < drift
        assert sum(cached.get("ram", 0) for _, cached in found) > 100
        told, cached = scores(opened, prompts[-1])
        assert sum(cached.values()) == len(prompts[-1]) - 1
        assert apart(cold[-1], told) < drift
    with service(path, folder / "kept") as opened:
        found = [scores(opened, prompt) for prompt in prompts]
        assert max(apart(one, told) for one, (told, _) in zip(cold, found, strict=True)) < drift
        assert sum(cached.get("disk", 0) for _, cached in found) > 100


@pytest.mark.parametrize("name", TINY)
def test_repeated_evicted_and_restarted_is_cold(tiny: Path, tmp_path: Path, name: str) -> None:
    hashes.sha256_of(tiny / f"{name}.gguf")
    hold(tiny / f"{name}.gguf", tmp_path, PROMPTS, DRIFT)


@pytest.mark.real
def test_the_real_model_answers_from_what_is_kept_as_from_nothing(smollm2: Path, tmp_path: Path) -> None:
    hashes.sha256_of(smollm2)
    hold(smollm2, tmp_path, [[50 + 31 * token for token in prompt] for prompt in PROMPTS], 1.0)
