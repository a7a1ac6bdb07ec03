"""Rows never run where cells of their window are missing, and a restore that stops half way gives a cold answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.guard import GuardError
from localllm.runtime.config import TierConfig
from localllm.runtime.engine import Clear, CopyPrefix, EditOutcome, Restore
from localllm.runtime.kv.blocks import NO_ROOT
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Gone, Link, Lookup, Tiers
from tests.backends.llamacpp.lanes import EXACT, OTHER, TEXT, apart, feed, forward, opened, rows
from tests.runtime.harness import Bench
from tests.tiny_models import WINDOWED

SIZE, N_BLOCKS, N_BARE = 32, 10, 6
EVERY = pytest.mark.parametrize("name", WINDOWED)


def _blobs(engine: LlamaEngine) -> list[bytes]:
    """Return the blocks of a text, the first ones exported when their window's cells were gone."""
    feed(engine, 0, TEXT[: N_BLOCKS * SIZE], chunk=SIZE)
    sound = [engine.export(0, n * SIZE, (n + 1) * SIZE) for n in range(N_BLOCKS)]
    feed(engine, 2, OTHER[:350])  # takes the cells that no window reaches any more
    feed(engine, 0, TEXT[N_BLOCKS * SIZE : 400], N_BLOCKS * SIZE)
    assert engine._guard.slots[0].first_held >= N_BARE * SIZE
    bare = [engine.export(0, n * SIZE, (n + 1) * SIZE) for n in range(N_BARE)]
    engine.edit([Clear(0), Clear(2)])
    return [*bare, *sound[N_BARE:]]


@EVERY
def test_what_lacks_cells_of_its_window_is_neither_run_nor_copied(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        blobs = _blobs(engine)
        end = N_BARE * SIZE
        cold = feed(engine, 4, TEXT[: end + 100], chunk=SIZE)
        for n in range(N_BARE):
            [held] = engine.edit([Restore(1, n * SIZE, blobs[n])])
        assert (held.n_valid, held.first_held) == (end, end)
        with pytest.raises(GuardError, match="window"):
            forward(engine, rows(1, end, TEXT[end : end + 4]))
        [copied] = engine.edit([CopyPrefix(1, 2, end)])
        assert (copied.n_valid, copied.outcome) == (0, EditOutcome.REFUSED)
        for n in (N_BARE, N_BARE + 1):
            [held] = engine.edit([Restore(1, n * SIZE, blobs[n])])
        assert held.first_held <= held.n_valid - engine.spec.window_tokens
        assert apart(cold, feed(engine, 1, TEXT[held.n_valid : end + 100], held.n_valid, chunk=SIZE)) < EXACT


@EVERY
@pytest.mark.parametrize("at", [2, N_BARE, N_BARE + 1])
def test_a_sequence_whose_prefix_stops_coming_back_answers_as_from_cold(tiny: Path, name: str, at: int) -> None:
    prompt = [*TEXT[: N_BLOCKS * SIZE], 7]
    with opened(tiny / f"{name}.gguf", n_ctx=2048) as engine:
        cold = Bench(engine).answer(prompt, max_tokens=30).choices[0].ids  # type: ignore[arg-type]
    with opened(tiny / f"{name}.gguf", n_ctx=2048) as engine:
        tiers = _tiers(engine)
        take = tiers.take

        def take_up_to(lookup: Lookup, link: Link) -> bytes | None:
            if link.block.start == at * SIZE:
                raise Gone
            return take(lookup, link)

        tiers.take = take_up_to  # type: ignore[method-assign]
        answer = Bench(engine, tiers=tiers).answer(prompt, max_tokens=30)  # type: ignore[arg-type]
        assert answer.choices[0].ids == cold
        assert answer.usage.cached_tokens.get("ram", 0) == (at * SIZE if at > N_BARE else 0)


def _tiers(engine: LlamaEngine) -> Tiers:
    """Return tiers that know a text, its first blocks bare."""
    tiers = Tiers(TierConfig(ram_bytes=1 << 26, block_tokens=SIZE), spec=engine.spec)
    chain = tiers.blank(NO_ROOT).chain
    for n, blob in enumerate(_blobs(engine)):
        block = chain.block(TEXT, n * SIZE, (n + 1) * SIZE)
        tiers.put(replace(block, is_bare=n < N_BARE), blob, Note(4096))
    return tiers
