"""Blocks that went through the tiers, also to disk and into another engine, give the logits of a cold prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.runtime.config import TierConfig
from localllm.runtime.engine import Clear, CopyPrefix, EditOutcome, ExportUnit, PrefixRule, Restore, Truncate
from localllm.runtime.kv.blocks import NO_ROOT, Block
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Link, Tiers
from tests.backends.llamacpp.lanes import (
    EXACT,
    OTHER,
    SHIPPED,
    SHIPPED_SETTINGS,
    TEXT,
    WRONG,
    Logits,
    apart,
    feed,
    opened,
)
from tests.tiny_models import TINY, WINDOWED

EVERY = pytest.mark.parametrize("name", TINY)
BOTH = pytest.mark.parametrize(("changes", "tolerance"), [({}, EXACT), (SHIPPED_SETTINGS, SHIPPED)], ids=["f32", "f16"])
SIZE = 32
N_KEPT, N_ALL = 160, 175


def tiers_of(engine: LlamaEngine, folder: Path | None = None) -> Tiers:
    """Return tiers of the engine; with a folder only the disk's, so that nothing can come from RAM."""
    ram_bytes = 0 if folder else 1 << 26
    config = TierConfig(
        ram_bytes=ram_bytes, disk_dir=str(folder or ""), disk_bytes=1 << 28, block_tokens=SIZE, flush_s=60
    )
    return Tiers(config, spec=engine.spec, model_name="tiny", can_write_disk=folder is not None)


def keep(engine: LlamaEngine, tiers: Tiers, tokens: list[int], slot: int = 0) -> None:
    """Compute tokens and have them kept as they complete, in blocks or whole."""
    chain = tiers.blank(NO_ROOT).chain
    for start in range(0, len(tokens), SIZE):
        end = min(start + SIZE, len(tokens))
        feed(engine, slot, tokens[start:end], start, chunk=SIZE)
        if engine.spec.export_unit is ExportUnit.BLOCK:
            _put(tiers, chain.block(tokens, start, end), engine.export(slot, start, end))
    if engine.spec.export_unit is ExportUnit.WHOLE:
        _put(tiers, chain.whole(tokens, len(tokens)), engine.export(slot, 0, len(tokens)))


def put_back(engine: LlamaEngine, tiers: Tiers, tokens: list[int], slot: int) -> int:
    """Put what is known of a prompt into a slot; return how many tokens that are."""
    lookup = tiers.look_up(NO_ROOT, tokens)
    links = tiers.match(lookup, tokens, len(tokens) - 1)
    engine.edit([Clear(slot)])
    for link in links:
        [result] = engine.edit([Restore(slot, link.block.start, _taken(tiers, lookup, link))])
        assert (result.outcome, result.n_valid) == (EditOutcome.OK, link.block.end)
        if link.n_used < link.block.n_tokens:
            engine.edit([Truncate(slot, link.end)])
    return links[-1].end if links else 0


def rest(engine: LlamaEngine, slot: int, tokens: list[int], start: int) -> Logits:
    """Compute what is left of a prompt as a cold one does from there on, and return the last row of logits."""
    cut = min(len(tokens), -(-start // SIZE) * SIZE)
    if cut > start:
        feed(engine, slot, tokens[start:cut], start)
    return feed(engine, slot, tokens[cut:], cut, chunk=SIZE) if cut < len(tokens) else feed(engine, slot, [], cut)


@BOTH
@EVERY
def test_restarted_equals_cold(
    tiny: Path, tmp_path: Path, name: str, changes: dict[str, Any], tolerance: float
) -> None:
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        cold = feed(engine, 0, TEXT[:N_ALL], chunk=SIZE)
        engine.edit([Clear(0)])
        tiers = tiers_of(engine, tmp_path)
        keep(engine, tiers, TEXT[:N_KEPT])
        tiers.close()
        assert tiers.stats().n_ram_blocks == 0
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        tiers = tiers_of(engine, tmp_path)
        feed(engine, 3, OTHER[:70])
        assert put_back(engine, tiers, TEXT[:N_ALL], 1) == N_KEPT
        assert apart(cold, rest(engine, 1, TEXT[:N_ALL], N_KEPT)) < tolerance
        assert put_back(engine, tiers, OTHER[:N_ALL], 2) == 0
        tiers.close()


@BOTH
@pytest.mark.parametrize("name", [name for name in TINY if name not in WINDOWED])
def test_a_part_of_what_is_kept_equals_cold(tiny: Path, name: str, changes: dict[str, Any], tolerance: float) -> None:
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        tokens = [*TEXT[:110], *OTHER[:40]]
        cold = feed(engine, 0, tokens, chunk=SIZE)
        engine.edit([Clear(0)])
        tiers = tiers_of(engine)
        keep(engine, tiers, TEXT[:N_KEPT])
        n_known = put_back(engine, tiers, tokens, 1)
        assert n_known == (110 if engine.spec.prefix_rule is PrefixRule.ANY else 0)
        assert apart(cold, rest(engine, 1, tokens, n_known)) < tolerance
        tiers.close()


@pytest.mark.parametrize("name", WINDOWED)
def test_what_was_put_back_is_not_cut_where_its_window_has_gaps(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:  # windows of 32, blocks of 64: each brings half of its cells
        tokens = [*TEXT[:100], *OTHER[:9]]
        cold = feed(engine, 0, tokens, chunk=SIZE)
        feed(engine, 1, TEXT[:64])
        first = engine.export(1, 0, 64)
        feed(engine, 1, TEXT[64:128], 64)
        second = engine.export(1, 64, 128)
        *_, held = engine.edit([Clear(1), Restore(1, 0, first), Restore(1, 64, second)])
        assert (held.n_valid, held.first_held) == (128, 96)
        copied, whole, cut = engine.edit([CopyPrefix(1, 2, 100), CopyPrefix(1, 3, 128), Truncate(3, 100)])
        assert (copied.n_valid, whole.first_held, cut.n_valid) == (0, 96, 0)
        [kept] = engine.edit([CopyPrefix(1, 2, 128)])
        assert kept.n_valid == 128
        feed(engine, 1, TEXT[128:160], 128)
        [later] = engine.edit([CopyPrefix(1, 2, 140)])  # by now the window is whole again
        assert later.n_valid == 140
        assert apart(cold, feed(engine, 4, tokens, chunk=SIZE)) < EXACT


@EVERY
def test_one_wrong_block_shows(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:  # the control
        cold = feed(engine, 0, TEXT[:N_ALL], chunk=SIZE)
        engine.edit([Clear(0)])
        tiers = tiers_of(engine)
        keep(engine, tiers, TEXT[:N_KEPT])
        wrong = [*TEXT[: N_KEPT - SIZE], *OTHER[:SIZE]]
        engine.edit([Clear(1)])
        feed(engine, 1, wrong, chunk=SIZE)
        is_whole = engine.spec.export_unit is ExportUnit.WHOLE
        lookup = tiers.look_up(NO_ROOT, TEXT[:N_ALL])
        last = tiers.match(lookup, TEXT[:N_ALL], N_ALL - 1)[-1].block
        _put(tiers, last, engine.export(1, 0 if is_whole else N_KEPT - SIZE, N_KEPT))
        assert put_back(engine, tiers, TEXT[:N_ALL], 2) == N_KEPT
        assert apart(cold, rest(engine, 2, TEXT[:N_ALL], N_KEPT)) > WRONG
        tiers.close()


@EVERY
def test_another_engines_blocks_are_not_found(tiny: Path, tmp_path: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        tiers = tiers_of(engine, tmp_path)
        keep(engine, tiers, TEXT[:64])
        tiers.close()
    other = TINY[(TINY.index(name) + 1) % len(TINY)]
    for path, changes in ((tiny / f"{other}.gguf", {}), (tiny / f"{name}.gguf", {"kv_v": "f16", "kv_k": "f16"})):
        with opened(path, **changes) as engine:
            tiers = tiers_of(engine, tmp_path)
            assert put_back(engine, tiers, TEXT[:65], 0) == 0
            tiers.close()


@EVERY
def test_a_damaged_blob_is_refused_and_the_slot_stays_as_it_was(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        tiers = tiers_of(engine)
        keep(engine, tiers, TEXT[:64])
        lookup = tiers.look_up(NO_ROOT, TEXT[:65])
        first = tiers.match(lookup, TEXT[:65], 64)[0]
        blob = _taken(tiers, lookup, first)
        for at in (0, 30, len(blob) // 2, len(blob) - 1):
            spoilt = bytearray(blob)
            spoilt[at] ^= 0x40
            [result] = engine.edit([Restore(1, 0, bytes(spoilt))])
            assert (result.n_valid, result.outcome) == (0, EditOutcome.REFUSED)
        tiers.refused(first.block)
        assert tiers.match(lookup, TEXT[:65], 64) == ()
        tiers.close()


@pytest.mark.real
def test_the_real_model_goes_on_from_disk_as_from_cold(smollm2: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**SHIPPED_SETTINGS, "n_ctx": 1024}
    tokens, others = ([40 + 53 * token for token in text[:N_ALL]] for text in (TEXT, OTHER))
    with opened(smollm2, **changes) as engine:
        cold = feed(engine, 0, tokens, chunk=SIZE)
        changed = feed(engine, 1, [*tokens[:128], *others[:SIZE], *tokens[N_KEPT:]], chunk=SIZE)
        engine.edit([Clear(0), Clear(1)])
        tiers = tiers_of(engine, tmp_path)
        keep(engine, tiers, tokens[:N_KEPT])
        tiers.close()
    with opened(smollm2, **changes) as engine:
        tiers = tiers_of(engine, tmp_path)
        assert put_back(engine, tiers, tokens, 0) == N_KEPT
        assert apart(cold, rest(engine, 0, tokens, N_KEPT)) < SHIPPED
        assert apart(cold, changed) > 20 * SHIPPED
        tiers.close()


def _put(tiers: Tiers, block: Block, blob: bytes) -> None:
    tiers.put(replace(block), blob, Note(4096))


def _taken(tiers: Tiers, lookup: Any, link: Link) -> bytes:
    """Return a link's bytes, once they are read."""
    import time

    for _ in range(2000):
        blob = tiers.take(lookup, link)
        if blob is not None:
            return blob
        time.sleep(0.005)
    raise AssertionError("a block was never read")
