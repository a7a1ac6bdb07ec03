"""An exact engine gives the same bits whatever else it holds and runs, and however a prefix came to be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.guard import GuardError
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings, ModelSettings
from localllm.errors import EngineError
from localllm.models.info import read_info
from localllm.runtime.engine import (
    Clear,
    CopyPrefix,
    EditOutcome,
    ExportUnit,
    PrefixRule,
    Restore,
    Rewind,
    Truncate,
)
from tests.backends.llamacpp.lanes import OTHER, TEXT, Logits, forward, rows
from tests.tiny_models import HYBRID, TINY, WINDOWED

CUT = 64
N_PROMPT = 200
N_AFTER = 12
EVERY = pytest.mark.parametrize("name", TINY)


@contextmanager
def exact(path: Path, *, threads: int = 1, exact_rows: int = 7) -> Iterator[LlamaEngine]:
    """Open an engine as `--deterministic` does, but small."""
    model = LlamaModel.load(read_info(path), ModelSettings(repack=False))
    settings = ContextSettings(
        n_ctx=6 * 512,
        n_slots=6,
        n_batch=CUT,
        n_ubatch=CUT,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn="on",
        kv_k="q8_0",
        kv_v="q8_0",
        kv_unified=False,
        swa_full=True,
        cut_tokens=CUT,
        exact_rows=exact_rows,
    )
    engine = LlamaEngine(model, settings)
    try:
        yield engine
    finally:
        engine.close()


def prompt(engine: LlamaEngine, slot: int, tokens: list[int], start: int = 0) -> Logits:
    """Compute a prompt from a cut on as the recipe has it; return the logits of its last token."""
    last = len(tokens) - 1
    while start < last:
        end = min(start + CUT, last)
        forward(engine, rows(slot, start, tokens[start:end], 0))
        start = end
    return forward(engine, rows(slot, last, tokens[last:]))[0]


def answer(engine: LlamaEngine, slot: int = 0, start: int = 0) -> Logits:
    """Compute TEXT's prompt and go on row by row; return [1 + N_AFTER, n_vocab]."""
    logits = [prompt(engine, slot, TEXT[:N_PROMPT], start)]
    for at in range(N_PROMPT, N_PROMPT + N_AFTER):
        logits.append(forward(engine, rows(slot, at, TEXT[at : at + 1]))[0])
    return np.array(logits)


def same(one: Logits, other: Logits) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def _cuts(engine: LlamaEngine) -> list[tuple[int, int]]:
    """Return where the first 192 tokens are taken out: block by block, or as a whole."""
    return [(0, 64), (64, 128), (128, 192)] if engine.spec.export_unit is ExportUnit.BLOCK else [(0, 192)]


@EVERY
def test_neighbours_and_holes_change_no_bit(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        assert np.ptp(alone) > 1
        prompt(engine, 1, OTHER[:300])
        prompt(engine, 2, OTHER[:90])
        engine.edit([Clear(0), Clear(1)])
        assert same(alone, answer(engine, 3))
        logits = [prompt(engine, 4, TEXT[:N_PROMPT])]
        engine.edit([Clear(2)])  # a hole below those who decode
        for at in range(N_PROMPT, N_PROMPT + N_AFTER):
            logits.append(forward(engine, rows(4, at, TEXT[at : at + 1]))[0])
            prompt(engine, 1, OTHER[:70])
            engine.edit([Clear(1)])
        assert same(alone, np.array(logits))
        wrong = [*TEXT[: N_PROMPT - 9], OTHER[0], *TEXT[N_PROMPT - 8 : N_PROMPT]]
        assert not same(alone[:1], prompt(engine, 2, wrong)[None])


@EVERY
def test_threads_change_no_bit(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
    for threads in (2, 3):
        with exact(tiny / f"{name}.gguf", threads=threads) as engine:
            assert same(alone, answer(engine)), threads


@EVERY
def test_float_weights_run_one_row_at_a_time(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:  # their kernels for one row add up in another order
        assert engine.spec.exact_rows == 1
        with pytest.raises(GuardError, match="exact"):
            forward(engine, rows(0, 0, TEXT[:1]), rows(1, 0, TEXT[:1]))


@EVERY
def test_what_is_no_chunk_is_refused(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        prompt(engine, 0, TEXT[:40])
        for items in ([rows(0, 40, TEXT[40:90])], [rows(1, 0, TEXT[:20]), rows(2, 0, TEXT[:20])]):
            with pytest.raises(GuardError, match="exact"):
                forward(engine, *items)


@EVERY
def test_a_copied_prefix_goes_on_to_the_same_bits(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        edits, n_kept = _kept_at(engine, 1, 192)
        engine.edit(edits(1))
        prompt(engine, 2, OTHER[:30])
        [copied] = engine.edit([CopyPrefix(1, 2, n_kept)])
        assert (copied.n_valid, copied.outcome) == (192, EditOutcome.OK)
        assert same(alone, answer(engine, 2, 192))
        assert same(alone, answer(engine, 1, 192))


@EVERY
def test_a_copy_is_made_whatever_becomes_of_both_slots_before_the_next_forward(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        edits, n_kept = _kept_at(engine, 1, 192)
        engine.edit(edits(1))
        prompt(engine, 2, OTHER[:200])
        prompt(engine, 3, OTHER[:230])
        if engine.spec.export_unit is ExportUnit.BLOCK:
            others = [(start, engine.export(3, start, start + 64)) for start in (0, 64, 128)]
        else:
            others = [(0, engine.export(3, 0, 230))]
        engine.edit([CopyPrefix(1, 2, n_kept)])
        engine.edit([Clear(1), *(Restore(1, start, blob) for start, blob in others)])  # the source becomes another
        assert same(alone, answer(engine, 2, 192))


@EVERY
def test_what_is_taken_out_of_a_fresh_copy_is_what_was_copied_or_nothing(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        edits, n_kept = _kept_at(engine, 1, 192)
        engine.edit(edits(1))
        prompt(engine, 2, OTHER[:200])
        engine.edit([CopyPrefix(1, 2, n_kept)])
        cuts = _cuts(engine)
        if name in WINDOWED:  # a state has not all that a copy needs, so the copy waits for a forward
            with pytest.raises(EngineError, match="next forward"):
                engine.export(2, 0, 192)
            prompt(engine, 3, OTHER[:1])
        blobs = [(start, engine.export(2, start, end)) for start, end in cuts]
        results = engine.edit([Restore(4, start, blob) for start, blob in blobs])
        assert {result.outcome for result in results} == {EditOutcome.OK}
        assert same(alone, answer(engine, 4, 192))


@pytest.mark.parametrize("name", [name for name in TINY if name not in (*HYBRID, *WINDOWED)])
def test_blocks_follow_on_a_fresh_copy(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        third = engine.export(0, 128, 192)
        prompt(engine, 1, [*TEXT[:128], *OTHER[:90]])  # begins alike, and goes on otherwise
        prompt(engine, 2, OTHER[:230])
        copied, put = engine.edit([CopyPrefix(1, 2, 128), Restore(2, 128, third)])
        assert (copied.n_valid, put.n_valid, put.outcome) == (128, 192, EditOutcome.OK)
        assert same(alone, answer(engine, 2, 192))


@EVERY
def test_what_was_put_back_goes_on_to_the_same_bits(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        edits, _ = _kept_at(engine, 1, 192)
        engine.edit(edits(1))
        cuts = _cuts(engine)
        blobs = [(start, engine.export(1, start, end)) for start, end in cuts]
        prompt(engine, 2, OTHER[:170])
        engine.edit([Clear(1)])
        results = engine.edit([Restore(3, start, blob) for start, blob in blobs])
        assert {result.outcome for result in results} == {EditOutcome.OK}
        assert same(alone, answer(engine, 3, 192))
    with exact(tiny / f"{name}.gguf", threads=1) as engine:  # another process, for all that it knows
        engine.edit([Restore(0, start, blob) for start, blob in blobs[:2]])
        engine.edit([Restore(0, start, blob) for start, blob in blobs[2:]])
        assert same(alone, answer(engine, 0, 192))


@pytest.mark.parametrize("name", [name for name in TINY if name not in (*HYBRID, *WINDOWED)])
def test_blocks_are_joined_only_where_they_follow(tiny: Path, name: str) -> None:
    with exact(tiny / f"{name}.gguf") as engine:
        alone = answer(engine)
        first, second, third = (engine.export(0, start, start + 64) for start in (0, 64, 128))
        prompt(engine, 1, OTHER[:200])
        foreign = engine.export(1, 64, 128)
        spoilt = second[:-5] + bytes(5)
        engine.edit([Clear(1)])
        results = engine.edit([Restore(1, 0, first), Restore(1, 64, spoilt), Restore(1, 128, third)])
        assert [result.outcome for result in results] == [EditOutcome.OK, EditOutcome.REFUSED, EditOutcome.NO_ROOM]
        assert [result.n_valid for result in results] == [64, 64, 64]
        [held] = engine.edit([Restore(1, 64, third)])
        assert (held.n_valid, held.outcome) == (64, EditOutcome.REFUSED)
        engine.edit([Restore(1, 64, second), Restore(1, 128, third)])
        assert same(alone, answer(engine, 1, 192))
        engine.edit([Clear(1)])
        engine.edit([Restore(1, 0, first), Restore(1, 64, foreign), Restore(1, 128, third)])
        assert not same(alone, answer(engine, 1, 192))


def _kept_at(engine: LlamaEngine, slot: int, n_tokens: int):  # type: ignore[no-untyped-def]
    """Compute TEXT up to a cut and beyond; return the edits that bring a slot back there, and what to copy then."""
    if engine.spec.prefix_rule is PrefixRule.CHECKPOINT:
        for start in range(0, n_tokens, CUT):
            forward(engine, rows(slot, start, TEXT[start : start + CUT], 0))
        checkpoint = engine.checkpoint(slot)
        forward(engine, rows(slot, n_tokens, OTHER[:40], 0))
        return (lambda index: [Rewind(index, checkpoint, n_tokens)]), n_tokens
    prompt(engine, slot, [*TEXT[:n_tokens], *OTHER[:40]])
    return (lambda index: [Truncate(index, n_tokens)]), n_tokens


@pytest.mark.real
def test_rows_that_run_together_give_the_bits_of_each_alone(smollm2: Path) -> None:
    tokens = [40 + 53 * token for token in TEXT[:60]]
    with exact(smollm2, threads=2) as engine:
        n_rows = engine.spec.exact_rows  # what this machine's kernels allow: 7 on x86
        assert n_rows in (1, 7)
        alone = np.array([forward(engine, rows(0, at, tokens[at : at + 1]))[0] for at in range(60)])
        engine.edit([Clear(0)])
        found, at = [], 0
        while at < 60:
            n_own = min(1 + at % n_rows, 60 - at)
            beside = [rows(slot, at, tokens[at : at + 1]) for slot in range(1, 1 + min(4, n_rows - n_own))]
            engine.edit([Clear(item.slot) for item in beside])
            beside = [rows(item.slot, 0, tokens[:1]) for item in beside]
            found += list(forward(engine, rows(0, at, tokens[at : at + n_own], n_own), *beside)[:n_own])
            at += n_own
        assert same(alone, np.array(found))
