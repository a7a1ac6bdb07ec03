"""Texts become one vector each, in chunks on the spare slot, and disturb nobody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localllm import compose
from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.guard import GuardError
from localllm.backends.llamacpp.pooling import Pooling, RunningPool
from localllm.runtime.config import LoadConfig
from localllm.runtime.engine import Clear, EmbedChunk
from localllm.runtime.events import Embedded
from localllm.runtime.modes import served
from localllm.runtime.service import Service
from localllm.runtime.stream import collect
from localllm.runtime.types import EmbeddingRequest
from tests.backends.llamacpp.lanes import EXACT, OTHER, TEXT, apart, feed, opened

MODEL = "llama-dense.gguf"


def embed(engine: LlamaEngine, text: Sequence[int], n_rows: int = 64) -> np.ndarray:
    """Embed a text in chunks of `n_rows`; only the last one gives something."""
    for start in range(0, len(text), n_rows):
        vector = engine.embed(EmbedChunk(start, text[start : start + n_rows], start + n_rows >= len(text)))
        assert (vector is not None) == (start + n_rows >= len(text))
    assert vector is not None
    return vector


@pytest.mark.parametrize("name", [MODEL, "gemma3-dense.gguf", "mamba2-dense.gguf", "lfm2-dense.gguf"])
def test_embeddings_are_mean_pooled_whatever_the_chunks_and_leave_the_slots_alone(tiny: Path, name: str) -> None:
    with opened(tiny / name, n_ubatch=64, n_batch=64) as engine:
        feed(engine, 0, TEXT[:50])
        whole, chunked, other = embed(engine, TEXT[:50]), embed(engine, TEXT[:50], 7), embed(engine, OTHER[:150])
        assert whole.shape == (engine._model.n_embd,)
        assert np.isfinite(other).all()
        assert apart(whole, chunked) < EXACT < apart(whole, other)
        after = feed(engine, 0, TEXT[50:60], 50)
        assert apart(after, feed(engine, 1, TEXT[:60])) < EXACT


def test_a_step_between_the_chunks_of_a_text_changes_neither(tiny: Path) -> None:
    with opened(tiny / MODEL, n_ubatch=64, n_batch=64) as engine:
        alone = embed(engine, TEXT[:60], 20)
        expected = feed(engine, 1, OTHER[:30])
        engine.embed(EmbedChunk(0, TEXT[:20], False))
        between = feed(engine, 2, OTHER[:30])
        engine.embed(EmbedChunk(20, TEXT[20:40], False))
        feed(engine, 2, OTHER[30:40], 30)
        vector = engine.embed(EmbedChunk(40, TEXT[40:60], True))
        assert vector is not None
        assert apart(vector, alone) < EXACT
        assert apart(between, expected) < EXACT


def test_a_text_that_is_given_up_leaves_room_for_the_next(tiny: Path) -> None:
    with opened(tiny / MODEL, n_ubatch=64, n_batch=64) as engine:
        expected = embed(engine, TEXT[:20])
        feed(engine, 0, TEXT[:20])
        engine.embed(EmbedChunk(0, OTHER[:30], False))
        with pytest.raises(GuardError, match="spare"):
            engine.export(0, 0, 10)
        engine.edit([Clear(engine.spec.n_slots - 1)])
        assert apart(embed(engine, TEXT[:20]), expected) < EXACT


@pytest.mark.parametrize(
    "bad",
    [EmbedChunk(0, [], True), EmbedChunk(0, [128], True), EmbedChunk(0, [1] * 65, True), EmbedChunk(3, [1], True)],
    ids=["no rows", "an id outside the vocabulary", "too many rows", "not where the text ends"],
)
def test_a_bad_chunk_of_a_text_is_stopped_before_native_code(tiny: Path, bad: EmbedChunk) -> None:
    with opened(tiny / MODEL, n_ubatch=64, n_batch=64) as engine:
        with pytest.raises(GuardError):
            engine.embed(bad)
        assert engine.embed(EmbedChunk(0, TEXT[:5], True)) is not None


def test_the_rows_of_a_text_are_few_enough_for_their_logits_to_be_small(tiny: Path) -> None:
    with opened(tiny / MODEL, n_ubatch=128, n_batch=256) as engine:
        assert engine.spec.max_embed_rows == 64
    with opened(tiny / MODEL, n_ubatch=16, n_batch=16) as engine:
        assert engine.spec.max_embed_rows == 16


@pytest.mark.parametrize(
    ("pooling", "expected"), [(Pooling.MEAN, [3, 4]), (Pooling.CLS, [1, 2]), (Pooling.LAST, [5, 6])]
)
def test_rows_are_pooled_as_the_file_asks_for(pooling: Pooling, expected: list[float]) -> None:
    pool = RunningPool(pooling)
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    pool.add(rows[:2])
    pool.add(rows[2:])
    rows[:] = 0
    assert pool.result().tolist() == expected


@pytest.mark.real
def test_texts_that_mean_the_same_are_closest_also_beside_a_stream(smollm2: Path) -> None:
    texts = ("A cat sat on the mat.", "A kitten is sitting on a rug.", "Quarterly revenue rose by 12%." * 9)
    with compose.open(smollm2, served(LoadConfig(ctx=1024, threads=1), 2)) as service:
        alone = _embedded(service, texts)
        stream = service.stream("Count to twenty.", max_tokens=8, ignore_eos=True)
        beside = _embedded(service, texts)
        assert len(collect(stream).choices[0].ids) == 8
    cat, kitten, revenue = alone
    assert cat @ kitten > max(cat @ revenue, kitten @ revenue)
    for one, other in zip(alone, beside, strict=True):
        assert one @ other > 0.999


def _embedded(service: Service, texts: tuple[str, ...]) -> list[np.ndarray]:
    events = list(service.submit(EmbeddingRequest(texts)))
    return [np.frombuffer(event.vector, "<f4") for event in events if isinstance(event, Embedded)]
