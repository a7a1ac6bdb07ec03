"""What would kill the process (native.md, N2 to N9), or be silently wrong, never reaches native code."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.guard import Guard, GuardError
from localllm.errors import EngineError
from localllm.runtime.engine import (
    Batch,
    BatchItem,
    Clear,
    CopyPrefix,
    Edit,
    EditOutcome,
    EmbedChunk,
    EngineSpec,
    NoRoom,
    Restore,
    Rewind,
    Truncate,
)
from tests.backends.llamacpp.lanes import EXACT, OTHER, SHIPPED_SETTINGS, TEXT, apart, feed, forward, opened, rows

MODEL = "llama-dense.gguf"

BAD_BATCHES = {
    "no items": (),
    "no rows": (BatchItem(0, 10, [], 0),),
    "more rows than the batch (N4)": (BatchItem(0, 10, [1] * 257, 1),),
    "more rows in all than the batch (N4)": (BatchItem(0, 10, [1] * 200, 1), BatchItem(1, 0, [1] * 57, 1)),
    "a negative id": (BatchItem(0, 10, [1, -1], 1),),
    "an id beyond the vocabulary": (BatchItem(0, 10, [1, 128], 1),),
    "a slot that is not there": (BatchItem(6, 0, [1], 1),),
    "the spare slot": (BatchItem(5, 0, [1], 1),),
    "a negative slot": (BatchItem(-1, 0, [1], 1),),
    "a gap": (BatchItem(0, 11, [1], 1),),
    "an overlap": (BatchItem(0, 9, [1], 1),),
    "a negative start": (BatchItem(1, -1, [1], 1),),
    "the same slot twice": (BatchItem(0, 10, [1], 1), BatchItem(0, 11, [1], 1)),
    "more logits than rows": (BatchItem(0, 10, [1], 2),),
    "negative logits": (BatchItem(0, 10, [1], -1),),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_changes_nothing(tiny: Path, case: str) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:10])
        with pytest.raises(GuardError):
            engine.forward(Batch(BAD_BATCHES[case]))
        after = feed(engine, 0, TEXT[10:20], 10)
        assert apart(after, feed(engine, 1, TEXT[:20])) < EXACT


def test_an_unknown_adapter_is_refused(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine, pytest.raises(GuardError, match="adapter"):
        engine.forward(Batch((BatchItem(0, 0, [1], 1),), adapter="x"))


BAD_EDITS: tuple[Edit, ...] = (
    Clear(6),
    Clear(-1),
    Truncate(6, 0),
    Truncate(0, -1),
    CopyPrefix(5, 0, 1),
    CopyPrefix(0, 0, 1),
    CopyPrefix(0, 1, -1),
    Restore(5, 0, b""),
    Rewind(9, b"", 1),
)


@pytest.mark.parametrize("edit", BAD_EDITS, ids=repr)
def test_a_bad_edit_is_refused(tiny: Path, edit: Edit) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:10])
        with pytest.raises(GuardError):
            engine.edit([edit])


def test_nothing_is_copied_over_a_text_that_is_being_embedded(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:10])
        engine.embed(EmbedChunk(0, TEXT[:4], is_last=False))
        with pytest.raises(GuardError, match="embedded"):
            engine.edit([CopyPrefix(0, 5, 10)])


def test_learned_positions_end_at_the_trained_context() -> None:
    spec = EngineSpec(
        n_vocab=128,
        n_slots=2,
        pool_tokens=512,
        max_batch_tokens=64,
        max_sequence_tokens=100,
        max_embed_tokens=100,
        max_embed_rows=64,
    )
    guard = Guard(spec)
    guard.slots[0].n_valid = 99
    guard.batch(Batch((BatchItem(0, 99, [1], 1),)))
    with pytest.raises(GuardError, match="exceed 100"):
        guard.batch(Batch((BatchItem(0, 99, [1, 1], 1),)))


@pytest.mark.parametrize("token", [-1, 128, 10**7])
def test_a_piece_outside_the_vocabulary_is_refused(tiny: Path, token: int) -> None:
    with opened(tiny / MODEL) as engine, pytest.raises(EngineError, match="vocabulary"):
        engine.tokenizer.piece(token)  # N3


def test_no_room_changes_nothing(tiny: Path) -> None:
    with opened(tiny / MODEL, n_ctx=256) as engine:
        feed(engine, 0, TEXT[:200])
        feed(engine, 1, OTHER[:30])
        block = engine.export(0, 0, 64)
        with pytest.raises(NoRoom):
            forward(engine, rows(0, 200, TEXT[200:202]), rows(1, 30, OTHER[30:90]))
        [restored] = engine.edit([Restore(2, 0, block)])
        assert (restored.n_valid, restored.outcome) == (0, EditOutcome.NO_ROOM)
        first, second = feed(engine, 0, TEXT[200:210], 200), feed(engine, 1, OTHER[30:40], 30)
        engine.edit([Clear(0)])
        assert apart(second, feed(engine, 2, OTHER[:40])) < EXACT
        engine.edit([Clear(1), Clear(2)])
        assert apart(first, feed(engine, 0, TEXT[:210])) < EXACT


def test_every_flipped_or_cut_blob_is_refused(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:40])
        blob, checkpoint = engine.export(0, 0, 40), engine.checkpoint(0)
        places = np.random.default_rng(1).integers(0, len(blob), 60)
        damaged = [blob[:at] + bytes([blob[at] ^ 0x10]) + blob[at + 1 :] for at in (*range(48), *map(int, places))]
        damaged += [blob[:at] for at in (0, 1, 47, 48, len(blob) - 1)] + [blob + b"\0", checkpoint]
        results = engine.edit([Restore(1, 0, bad) for bad in damaged])
        assert {(result.n_valid, result.outcome) for result in results} == {(0, EditOutcome.REFUSED)}
        assert engine.edit([Restore(1, 0, blob)])[0].n_valid == 40


def test_a_blob_of_another_model_or_place_is_refused(tiny: Path) -> None:
    with opened(tiny / "qwen2-dense.gguf") as other:
        feed(other, 0, TEXT[:40])
        foreign = other.export(0, 0, 40)
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:40])
        later = engine.export(0, 20, 40)
        skipped, refused, moved = engine.edit([Restore(1, 20, later), Restore(1, 0, foreign), Restore(1, 0, later)])
        assert (skipped.n_valid, skipped.outcome) == (0, EditOutcome.NO_ROOM)  # the blob is not to blame
        assert (refused.outcome, moved.outcome) == (EditOutcome.REFUSED, EditOutcome.REFUSED)
        [rewound] = engine.edit([Rewind(0, later, 40)])
        assert (rewound.n_valid, rewound.outcome) == (0, EditOutcome.REFUSED)


@pytest.mark.parametrize("apart_streams", [False, True], ids=["shared pool", "own streams"])
def test_a_block_of_a_longer_context_is_not_to_blame(tiny: Path, apart_streams: bool) -> None:
    changes = {"kv_unified": False, "cut_tokens": 64, "n_ctx": 6 * 512, **SHIPPED_SETTINGS} if apart_streams else {}
    with opened(tiny / MODEL, **changes) as engine:
        for start in (0, 64):
            feed(engine, 0, TEXT[start : start + 64], start)
        blocks = [engine.export(0, start, start + 64) for start in (0, 64)]
    with opened(tiny / MODEL, **changes, max_sequence_tokens=100) as engine:
        first, second = engine.edit([Restore(1, 64 * n, block) for n, block in enumerate(blocks)])
        assert (first.n_valid, first.outcome) == (64, EditOutcome.OK)
        assert (second.n_valid, second.outcome) == (64, EditOutcome.NO_ROOM)


def test_an_export_of_what_is_not_held_is_refused(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:40])
        for slot, start, end in ((0, 0, 41), (0, 10, 10), (0, -1, 5), (1, 0, 1), (5, 0, 1)):
            with pytest.raises(GuardError):
                engine.export(slot, start, end)
        with pytest.raises(GuardError):
            engine.checkpoint(1)


def test_an_interrupted_forward_leaves_slots_that_only_clearing_helps(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine:
        feed(engine, 0, TEXT[:10])
        engine.interrupt()
        with pytest.raises(EngineError, match="interrupted"):
            forward(engine, rows(0, 10, TEXT[10:20]))
        for call in (lambda: forward(engine, rows(0, 10, TEXT[10:20])), lambda: engine.edit([CopyPrefix(0, 1, 5)])):
            with pytest.raises(GuardError):
                call()
        engine.edit([Clear(0)])
        assert apart(feed(engine, 0, TEXT[:20]), feed(engine, 1, TEXT[:20])) < EXACT


def test_a_closed_engine_refuses_every_call(tiny: Path) -> None:
    with opened(tiny / MODEL) as engine:
        pass
    engine.close()
    tokenizer = engine.tokenizer
    for call in (
        lambda: engine.edit([]),
        lambda: engine.forward(Batch((BatchItem(0, 0, [1], 1),))),
        lambda: engine.export(0, 0, 1),
        lambda: engine.embed(EmbedChunk(0, [1], True)),
        lambda: tokenizer.encode("a", parse_special=False),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_closing_waits_for_tokenizer_calls_in_other_threads(tiny: Path) -> None:
    failures: list[BaseException] = []

    def hammer(engine: LlamaEngine) -> None:
        try:
            while True:
                engine.tokenizer.encode("hello " * 200, parse_special=True)
        except EngineError:
            return
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        with opened(tiny / MODEL) as engine:
            threads = [threading.Thread(target=hammer, args=(engine,)) for _ in range(3)]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    assert failures == []
