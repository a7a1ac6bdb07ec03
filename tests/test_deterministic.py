"""Equal requests get answers equal to the last bit, whatever else runs and whatever is cached (and by default not)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm.compose import open as open_model
from localllm.models import hashes
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.service import Service
from localllm.runtime.stream import TokenStream, collect
from localllm.runtime.types import CacheUse, CompletionRequest, GenerationOptions
from tests.tiny_models import TINY, WINDOWED

STEM = tuple(2 + 37 * n % 120 for n in range(150))
PROMPTS = (
    STEM,
    STEM[:1],
    STEM[:63],
    STEM[:64],
    STEM[:65],
    (*STEM[:100], 9, 8, 7),
    tuple(reversed(STEM)),
    (*STEM, *STEM[::2]),
)
N_ANSWER = 12


@contextmanager
def service(path: Path, disk: Path | None = None, *, deterministic: bool = True, ctx: int = 256) -> Iterator[Service]:
    """Open a model for three at once, of whom one more is kept."""
    tiers = TierConfig(ram_bytes=1 << 26, disk_dir=str(disk or ""), disk_bytes=1 << 28)
    config = LoadConfig(ctx=ctx, threads=2, parallel=3, retained=1, deterministic=deterministic)
    opened = open_model(path, config, runtime=RuntimeConfig(tiers=tiers))
    try:
        yield opened
    finally:
        opened.close()


def ask(opened: Service, prompt: Sequence[int], client: str = "", cache: CacheUse = "on") -> TokenStream:
    options = GenerationOptions(
        max_tokens=N_ANSWER,
        seed=11,
        sampling={"temperature": 1.0, "min_p": 0.0},
        logprobs=0,
        ignore_eos=True,
        client=client,
        cache=cache,
    )
    return opened.submit(CompletionRequest(tuple(prompt), options))


def told(stream: TokenStream) -> list[tuple[int, float]]:
    """Return the ids of an answer with their logarithms: these tell any bit of the logits."""
    [choice] = collect(stream).choices
    return [(entry.id, entry.logprob) for entry in choice.logprobs]


def answers(opened: Service, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[tuple[int, float]]]:
    """Return the answers to prompts, one after another."""
    return [told(ask(opened, prompt)) for prompt in prompts]


def at_once(opened: Service, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[tuple[int, float]]]:
    """Return the answers to prompts that are asked together, by different clients."""
    streams = [ask(opened, prompt, f"client {n % 3}") for n, prompt in enumerate(prompts)]
    return [told(stream) for stream in streams]


@pytest.fixture(params=TINY)
def model(request: pytest.FixtureRequest, tiny: Path) -> Path:
    """Each tiny model, whose hash is known, so that its KV may go to disk."""
    path = tiny / f"{request.param}.gguf"
    hashes.sha256_of(path)
    return path


def test_cached_batched_restarted_and_evicted_equal_cold_and_alone(model: Path, tmp_path: Path) -> None:
    with service(model) as opened:
        cold = [told(ask(opened, prompt, cache="off")) for prompt in PROMPTS]
    disk = tmp_path / "kv"
    with service(model, disk) as opened:
        assert at_once(opened) == cold
        assert at_once(opened, PROMPTS[::-1]) == cold[::-1]
        assert answers(opened) == cold
        others = [[7 + n, *STEM[n:]] for n in range(6)]
        answers(opened, others)
        assert answers(opened) == cold  # from RAM: there is one slot for all that is kept
        assert opened.stats().n_prompt_tokens_ram > 0
    with service(model, disk) as opened:
        assert answers(opened) == cold
        assert opened.stats().n_prompt_tokens_disk > 0
    assert [[token for token, _ in answer] for answer in cold] != [[0] * N_ANSWER] * len(cold)


def test_without_it_answers_depend_on_what_else_there_is(tiny: Path) -> None:
    path = tiny / "llama-dense.gguf"  # the control: if this fails, the equality above means little
    with service(path, deterministic=False, ctx=768) as opened:
        alone = answers(opened)
        assert at_once(opened) != alone


@pytest.mark.real
def test_the_real_model_gives_equal_answers(smollm2: Path, tmp_path: Path) -> None:
    hashes.sha256_of(smollm2)
    prompts = [tuple(50 + 31 * token for token in prompt) for prompt in (*PROMPTS[:2], *PROMPTS[5:])]
    with service(smollm2) as opened:
        cold = answers(opened, prompts)
        assert at_once(opened, prompts) == cold
    with service(smollm2, tmp_path / "kv") as opened:
        assert at_once(opened, prompts) == cold
    with service(smollm2, tmp_path / "kv") as opened:
        assert answers(opened, prompts) == cold


def test_windows_keep_what_they_share(tiny: Path) -> None:
    with service(tiny / f"{WINDOWED[0]}.gguf") as opened:
        answers(opened, [STEM])
        usage = collect(ask(opened, (*STEM[:140], 3, 4))).usage
        assert usage.cached_tokens["device"] == 128
