"""The spec is the truth: what it denies is refused before native code, never silently wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from localllm.backends.llamacpp.facts import fingerprint, rope_factors
from localllm.backends.llamacpp.guard import GuardError
from localllm.runtime.engine import CopyPrefix, EditOutcome, ExportUnit, PrefixRule, Restore, Truncate
from tests.backends.llamacpp.lanes import TEXT, feed, forward, open_model, opened, rows, settings
from tests.tiny_models import HYBRID, ROLLS_BACK, TINY, WINDOWED


@pytest.mark.parametrize("name", TINY)
def test_spec_names_what_each_model_can_do(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        spec = engine.spec
    if name in HYBRID:
        assert spec.prefix_rule is PrefixRule.CHECKPOINT
        assert spec.max_rollback_tokens == (4 if name in ROLLS_BACK else 0)
        assert spec.export_unit is ExportUnit.WHOLE
    else:
        assert spec.prefix_rule is (PrefixRule.WINDOW if name in WINDOWED else PrefixRule.ANY)
        assert spec.max_rollback_tokens is None
        assert spec.export_unit is ExportUnit.BLOCK
    assert spec.window_tokens == (32 if name in WINDOWED else 0)
    n_batch = 128 if name in (*WINDOWED, "lfm2-dense") else 256  # one graph a forward where a window loses cells
    assert (spec.n_vocab, spec.n_slots, spec.max_batch_tokens, spec.max_sequence_tokens) == (128, 6, n_batch, 1024)


def test_a_slot_that_keeps_every_cell_can_be_cut_anywhere_but_not_once_it_was_put_back(tiny: Path) -> None:
    with opened(tiny / "gemma3-dense.gguf", swa_full=True, kv_unified=False, n_ctx=6 * 512) as engine:
        assert engine.spec.prefix_rule is PrefixRule.WINDOW  # a state has only the cells of its window
        feed(engine, 0, TEXT[:300])
        whole = engine.export(0, 0, 300)
        [cut] = engine.edit([Truncate(0, 100)])
        assert (cut.n_valid, cut.first_held, cut.outcome) == (100, 0, EditOutcome.OK)
        [restored] = engine.edit([Restore(1, 0, whole)])
        assert restored.n_valid == 300
        assert restored.first_held > 200
        [cut] = engine.edit([Truncate(1, 100)])
        assert (cut.n_valid, cut.outcome) == (0, EditOutcome.REFUSED)


def test_fingerprint_tells_engines_apart_whose_states_do_not_fit(tiny: Path) -> None:
    prints = set()
    for changes in ({}, {"kv_k": "f16"}, {"kv_v": "f16"}, {"kv_unified": False}, {"n_rs_seq": 2}, {"n_slots": 6}):
        with opened(tiny / "lfm2-dense.gguf", **changes) as engine:
            prints.add(engine.spec.fingerprint)
    with opened(tiny / "qwen35-dense.gguf") as engine:
        prints.add(engine.spec.fingerprint)
    assert len(prints) == 6  # the number of slots alone changes nothing


@dataclass(frozen=True)
class _Tensor:
    name: str


def test_fingerprint_tells_contexts_apart_that_turn_k_by_other_factors(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ours = open_model(tiny / "llama-dense.gguf"), settings()
    try:
        assert len({fingerprint(model, ours, n_ctx) for n_ctx in (512, 4096, 4097, 131072)}) == 1
        factors = tuple(_Tensor(f"rope_factors_{which}.weight") for which in ("long", "short"))
        monkeypatch.setattr(model, "info", replace(model.info, tensors=factors))
        known = {"llama.rope.scaling.original_context_length": "4096"}
        monkeypatch.setattr(model, "metadata", known.get)
        prints = [fingerprint(model, ours, n_ctx) for n_ctx in (512, 4096, 4097, 131072)]
        assert prints[0] == prints[1] != prints[2] == prints[3]
        known.clear()  # then it is what the model was trained for
        monkeypatch.setattr(model, "n_ctx_train", 512)
        assert [rope_factors(model, n_ctx) for n_ctx in (512, 513)] == ["short", "long"]
    finally:
        model.close()


def test_fingerprint_tells_of_k_that_is_not_rotated(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prints = set()
    for value in ("", "1"):
        if value:
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
        with opened(tiny / "llama-dense.gguf") as engine:
            prints.add(engine.spec.fingerprint)
    assert len(prints) == 2


@pytest.mark.parametrize("name", HYBRID)
def test_a_state_is_never_copied_or_exported_in_part(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        feed(engine, 0, TEXT[:50])
        [copied] = engine.edit([CopyPrefix(0, 1, 49)])
        assert (copied.n_valid, copied.outcome) == (0, EditOutcome.REFUSED)
        with pytest.raises(GuardError, match="whole"):
            engine.export(0, 0, 49)


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("n_rows", [2, 3, 9])
def test_a_rollback_deeper_than_the_snapshots_clears_the_slot(tiny: Path, name: str, n_rows: int) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        feed(engine, 0, TEXT[:50])
        forward(engine, rows(0, 50, TEXT[50 : 50 + n_rows]))
        allowed = min(engine.spec.max_rollback_tokens or 0, n_rows - 1)
        [cut] = engine.edit([Truncate(0, 50 + n_rows - allowed - 1)])
        assert (cut.n_valid, cut.outcome) == (0, EditOutcome.REFUSED)


@pytest.mark.parametrize("name", ROLLS_BACK)
def test_one_rollback_between_two_forwards(tiny: Path, name: str) -> None:
    with opened(tiny / f"{name}.gguf") as engine:
        feed(engine, 0, TEXT[:55], chunk=5)
        engine.edit([Truncate(0, 53)])
        for edit in (Truncate(0, 52), CopyPrefix(0, 1, 53)):
            with pytest.raises(GuardError):
                engine.edit([edit])
        for ask in (lambda: engine.checkpoint(0), lambda: engine.export(0, 0, 53)):
            with pytest.raises(GuardError):
                ask()
        feed(engine, 0, TEXT[53:55], 53)
        assert engine.edit([CopyPrefix(0, 1, 55), Truncate(0, 54)])[1].outcome is EditOutcome.REFUSED  # after a copy
