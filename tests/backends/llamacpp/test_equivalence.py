"""Whatever way a sequence came to be in a slot, its next logits are the same; each test has a control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.runtime.engine import (
    Batch,
    Clear,
    CopyPrefix,
    EditOutcome,
    ExportUnit,
    PrefixRule,
    Restore,
    Rewind,
    Truncate,
)
from tests.backends.llamacpp.lanes import (
    EXACT,
    OTHER,
    SHIPPED,
    SHIPPED_SETTINGS,
    TEXT,
    WRONG,
    apart,
    feed,
    forward,
    opened,
    rows,
)
from tests.tiny_models import HYBRID, ROLLS_BACK, TINY, WINDOWED

BOTH = pytest.mark.parametrize(("changes", "tolerance"), [({}, EXACT), (SHIPPED_SETTINGS, SHIPPED)], ids=["f32", "f16"])
EVERY = pytest.mark.parametrize("name", TINY)


@BOTH
@EVERY
def test_chunked_is_whole(tiny: Path, name: str, changes: dict[str, Any], tolerance: float) -> None:
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        whole = feed(engine, 0, TEXT[:120], chunk=120)
        assert apart(whole, feed(engine, 1, TEXT[:120], chunk=17)) < tolerance
        wrong = [*TEXT[:100], *OTHER[:15], *TEXT[115:120]]  # near the end: lfm2 sees only the last tokens
        assert apart(whole, feed(engine, 2, wrong, chunk=17)) > WRONG


@BOTH
@EVERY
def test_batched_is_single(tiny: Path, name: str, changes: dict[str, Any], tolerance: float) -> None:
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        alone = feed(engine, 0, TEXT[:100])
        feed(engine, 1, OTHER[:40])
        forward(engine, rows(2, 0, TEXT[:30]), rows(1, 40, OTHER[40:41]), rows(3, 0, OTHER[7:90]))
        mixed = forward(engine, rows(1, 41, OTHER[41:44], 3), rows(2, 30, TEXT[30:100]), rows(3, 83, OTHER[:1]))
        assert mixed.shape == (5, engine.spec.n_vocab)
        assert apart(alone, mixed[3]) < tolerance
        assert apart(alone, mixed[4]) > WRONG


@BOTH
@EVERY
def test_copied_is_computed(tiny: Path, name: str, changes: dict[str, Any], tolerance: float) -> None:
    with opened(tiny / f"{name}.gguf", **changes) as engine:
        feed(engine, 0, TEXT[:90])
        feed(engine, 1, OTHER[:50])  # the copy must clear this first
        [copied] = engine.edit([CopyPrefix(0, 1, 90)])
        assert (copied.n_valid, copied.outcome) == (90, EditOutcome.OK)
        computed = feed(engine, 0, TEXT[90:100], 90)
        assert apart(computed, feed(engine, 1, TEXT[90:100], 90)) < tolerance
        feed(engine, 2, OTHER[:90])
        assert apart(computed, feed(engine, 2, TEXT[90:100], 90)) > WRONG


@pytest.mark.parametrize("name", [name for name in TINY if name not in HYBRID])
def test_copied_in_part_is_computed(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected = feed(engine, 3, TEXT[:80])
        feed(engine, 0, TEXT[:60] + OTHER[:40])
        [copied] = engine.edit([CopyPrefix(0, 1, 60)])
        assert copied.n_valid == 60
        assert apart(expected, feed(engine, 1, TEXT[60:80], 60)) < EXACT
        after = feed(engine, 0, OTHER[40:50], 100)  # the source is as it was
        assert apart(after, feed(engine, 2, TEXT[:60] + OTHER[:50])) < EXACT


@pytest.mark.parametrize("name", [name for name in TINY if name not in HYBRID or name in ROLLS_BACK])
def test_rolled_back_is_never_drafted(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected = feed(engine, 0, TEXT[:70])
        for n_wrong in (1, 2, 4):
            engine.edit([Clear(1), Clear(2)])
            feed(engine, 1, TEXT[:50])
            draft = TEXT[50 : 55 - n_wrong] + OTHER[:n_wrong]
            forward(engine, rows(1, 50, draft, 5), rows(2, 0, OTHER[:9]))
            [cut] = engine.edit([Truncate(1, 55 - n_wrong)])
            assert (cut.n_valid, cut.outcome) == (55 - n_wrong, EditOutcome.OK)
            feed(engine, 2, OTHER[9:30], 9)  # another slot runs while this one is pending
            assert apart(expected, feed(engine, 1, TEXT[55 - n_wrong : 70], 55 - n_wrong)) < EXACT
        neighbour = feed(engine, 2, OTHER[30:40], 30)
        assert apart(neighbour, feed(engine, 3, OTHER[:40])) < EXACT


@EVERY
def test_rewound_is_recomputed_and_leaves_the_source(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected = feed(engine, 0, TEXT[:70])
        feed(engine, 1, TEXT[:60])
        checkpoint = engine.checkpoint(1)
        feed(engine, 1, OTHER[:40], 60)
        copied, rewound = engine.edit([CopyPrefix(1, 2, 100), Rewind(2, checkpoint, 60)])
        assert (copied.outcome, rewound.outcome, rewound.n_valid) == (EditOutcome.OK, EditOutcome.OK, 60)
        assert apart(expected, feed(engine, 2, TEXT[60:70], 60)) < EXACT
        source = feed(engine, 1, OTHER[40:50], 100)
        assert apart(source, feed(engine, 3, TEXT[:60] + OTHER[:50])) < EXACT
        engine.edit([Rewind(1, checkpoint, 60), CopyPrefix(1, 4, 60)])
        assert apart(expected, feed(engine, 4, TEXT[60:70], 60)) < EXACT
        assert apart(expected, source) > WRONG


@pytest.mark.parametrize("name", ROLLS_BACK)
@pytest.mark.parametrize("n_wrong", [1, 4])
def test_rewound_while_a_rollback_is_pending_is_recomputed(tiny: Path, name: str, n_wrong: int) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected = feed(engine, 0, TEXT[:70])
        feed(engine, 1, TEXT[:60])
        checkpoint = engine.checkpoint(1)
        feed(engine, 1, OTHER[:20], 60)
        forward(engine, rows(1, 80, OTHER[20:25], 5))
        engine.edit([Truncate(1, 85 - n_wrong)])
        rewound, copied = engine.edit([Rewind(1, checkpoint, 60), CopyPrefix(1, 2, 60)])
        assert (rewound.n_valid, copied.n_valid) == (60, 60)
        for slot in (1, 2):
            assert apart(expected, feed(engine, slot, TEXT[60:70], 60)) < EXACT


@pytest.mark.parametrize("name", HYBRID)
def test_a_checkpoint_is_exported_from_a_copy_on_the_spare_slot_and_restored(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected, spare = feed(engine, 0, TEXT[:70]), engine.spec.n_slots - 1
        feed(engine, 1, TEXT[:60])
        checkpoint = engine.checkpoint(1)
        feed(engine, 1, OTHER[:40], 60)
        engine.edit([CopyPrefix(1, spare, 100), Rewind(spare, checkpoint, 60)])
        blob = engine.export(spare, 0, 60)
        engine.edit([Clear(spare), Restore(2, 0, blob)])
        assert apart(expected, feed(engine, 2, TEXT[60:70], 60)) < EXACT
        source = feed(engine, 1, OTHER[40:50], 100)
        assert apart(source, feed(engine, 3, TEXT[:60] + OTHER[:50])) < EXACT


@EVERY
def test_restored_is_computed(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        expected = feed(engine, 0, TEXT[:100])
        blobs, others = _exported(engine, 1, TEXT[:90]), _exported(engine, 2, OTHER[:90])
        engine.edit([Clear(1), Clear(2)])
        results = engine.edit([Restore(1, start, blob) for start, blob in blobs])
        assert results[-1].n_valid == 90
        assert {result.outcome for result in results} == {EditOutcome.OK}
        assert apart(expected, feed(engine, 1, TEXT[90:100], 90)) < EXACT
        engine.edit([Restore(2, start, blob) for start, blob in (*blobs[:-1], others[-1])])
        assert apart(expected, feed(engine, 2, TEXT[90:100], 90)) > WRONG


@pytest.mark.parametrize("name", HYBRID)
def test_states_are_equal_byte_by_byte(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        feed(engine, 0, TEXT[:60])
        checkpoint, whole = engine.checkpoint(0), engine.export(0, 0, 60)
        feed(engine, 0, OTHER[:30], 60)
        assert engine.checkpoint(0) != checkpoint
        engine.edit([Rewind(0, checkpoint, 60)])
        assert engine.checkpoint(0) == checkpoint
        assert engine.export(0, 0, 60) == whole
        engine.edit([CopyPrefix(0, 1, 60), CopyPrefix(1, 0, 60)])  # a blob names its slot: there and back
        assert engine.export(0, 0, 60) == whole
        engine.edit([Clear(0), Restore(0, 0, whole)])
        assert engine.export(0, 0, 60) == whole


@pytest.mark.parametrize("name", WINDOWED)
def test_window_cut_is_recomputed_once_others_took_its_cells(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf", n_slots=4, n_batch=64, n_ubatch=64) as engine:
        window = engine.spec.window_tokens
        feed(engine, 0, TEXT[:300])
        first = 0
        for at in range(0, 400, 50):  # a lone sequence never loses its window
            forward(engine, rows(1, at, OTHER[at : at + 50]))
            first = engine.forward(_one_row(0, 300 + at // 50)).first_held[0]
        n_valid = 308
        assert first > 0, "no cells were lost: this tests nothing"
        refused, held = engine.edit([CopyPrefix(0, 2, first), CopyPrefix(0, 2, n_valid)])
        assert (refused.n_valid, refused.outcome) == (0, EditOutcome.REFUSED)
        assert (held.n_valid, held.outcome) == (n_valid, EditOutcome.OK)
        lowest = max(first + window, n_valid - 1)
        [cut] = engine.edit([Truncate(2, lowest)])
        assert cut.outcome is EditOutcome.OK
        cut_logits = feed(engine, 2, TEXT[lowest : lowest + 5], lowest)
        feed(engine, 1, TEXT[:1], 400)
        engine.edit([Clear(0), Clear(1)])
        assert apart(cut_logits, feed(engine, 1, TEXT[: lowest + 5])) < EXACT


@pytest.mark.parametrize("name", WINDOWED)
def test_drafts_roll_back_after_the_window_moved(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf", n_slots=4, n_batch=64, n_ubatch=64) as engine:
        feed(engine, 0, TEXT[:300])
        feed(engine, 1, OTHER[:300])
        forward(engine, rows(0, 300, TEXT[300:301] + OTHER[:5], 6), rows(1, 300, OTHER[300:340]))
        [cut] = engine.edit([Truncate(0, 301)])
        assert (cut.n_valid, cut.outcome) == (301, EditOutcome.OK)
        assert cut.first_held > 0
        rolled = feed(engine, 0, TEXT[301:310], 301)
        assert apart(rolled, feed(engine, 2, TEXT[:310])) < EXACT


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense", "qwen35-dense"])
def test_streams_copy_and_restore_like_one_pool(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf", kv_unified=False) as engine:
        assert (engine.spec.copy_shares_memory, engine.spec.export_unit) == (False, ExportUnit.WHOLE)
        feed(engine, 0, TEXT[:100])
        n_copied = 100 if engine.spec.prefix_rule is PrefixRule.CHECKPOINT else 80
        whole = engine.export(0, 0, 100)
        copied, restored = engine.edit([CopyPrefix(0, 1, n_copied), Restore(2, 0, whole)])
        assert (copied.n_valid, restored.n_valid) == (n_copied, 100)
        expected = feed(engine, 0, TEXT[100:110], 100)
        assert apart(expected, feed(engine, 1, TEXT[n_copied:110], n_copied)) < EXACT
        assert apart(expected, feed(engine, 2, TEXT[100:110], 100)) < EXACT


def _exported(engine: LlamaEngine, slot: int, tokens: list[int]) -> list[tuple[int, bytes]]:
    """Run `tokens` in a slot and export them as they complete, or whole; (start, blob) in order."""
    ends = (32, 64, len(tokens)) if engine.spec.export_unit is ExportUnit.BLOCK else (len(tokens),)
    blobs, start = [], 0
    for end in ends:
        feed(engine, slot, tokens[start:end], start)
        blobs.append((start, engine.export(slot, start, end)))
        start = end
    return blobs


def _one_row(slot: int, start: int) -> Batch:
    return Batch((rows(slot, start, TEXT[start : start + 1]),))
