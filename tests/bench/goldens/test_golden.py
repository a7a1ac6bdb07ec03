"""Goldens: each kind of move is found and told apart, and nothing moves by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.goldens import golden
from localllm.bench.goldens.checking import Move
from localllm.bench.goldens.golden import GoldenCheck, check, check_all, is_stale, record
from localllm.bench.goldens.prompts import PROMPTS
from localllm.bench.goldens.recording import N_TOKENS, N_TOP
from localllm.bench.goldens.report import check_document, check_text
from localllm.bench.goldens.shelf import Shelf
from localllm.errors import ModelNotFound, ModelRefused, Unavailable
from localllm.models.store import Store
from tests.bench.goldens.models import SETTINGS, FakeModels, bench
from tests.fake_engine import TEMPLATE, FakeEngine, endless_token
from tests.models.test_store import put


@pytest.fixture
def models(tmp_path: Path) -> FakeModels:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF and some weights")
    return FakeModels(folder)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def moves(found: GoldenCheck) -> set[Move]:
    return {move for prompt in found.prompts for move in prompt.moves}


def later(models: FakeModels, home: Path, **changed: Any) -> GoldenCheck:
    """Record, change something about the models, and check."""
    record("m.gguf", bench(models, home))
    return check("m.gguf", bench(replace(models, **changed), home))


def test_a_golden_keeps_ids_text_and_the_likeliest_of_each_prompt(models: FakeModels, home: Path) -> None:
    kept, path = record("m.gguf", bench(models, home))
    assert path.name == f"{kept['model']['sha256'][0]}.json"
    assert path.stat().st_mode & 0o077 == 0
    assert len(kept["entries"]) == len(PROMPTS) == 12
    for entry in kept["entries"]:
        assert entry["refused"] == ""
        assert entry["prompt_ids"]
        assert len(entry["ids"]) == len(entry["logprobs"]) == N_TOKENS
        assert entry["answer"]
        assert all(len(place) == N_TOP for place in entry["logprobs"])
    assert kept["settings"] == dict(SETTINGS)
    assert kept["fingerprint"]["machine"]["cpu"]
    assert str(models.folder) not in json.dumps(kept)
    assert models.engines[0].closed


def test_nothing_moves_by_itself(models: FakeModels, home: Path) -> None:
    found = later(models, home)
    assert not found.has_moved
    assert found.settings == ()
    assert [prompt.sentence for prompt in found.prompts] == ["same"] * 12
    assert "12 of 12 prompts the same; logprobs differ by at most 0 nats" in check_text([found])


def test_it_is_asked_as_it_was_alone_greedily_and_with_as_many_threads(models: FakeModels, home: Path) -> None:
    later(models, home)
    (first, runtime), (second, _) = models.configs
    assert (first.threads, second.threads) == (None, 3)
    assert (first.parallel, first.retained, first.ctx) == (1, 0, 2048)
    assert runtime.fixed_chunks
    for engine in models.engines:
        assert all(len(batch.items) == 1 for batch in engine.batches)
        assert engine.broken == []


def test_another_template_moves_prompt_tokens_of_chats_only(models: FakeModels, home: Path) -> None:
    found = later(models, home, template=TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}!"))
    for prompt, check_ in zip(PROMPTS, found.prompts, strict=True):
        assert (Move.PROMPT in check_.moves) == bool(prompt.messages)
        assert check_.prompt_at == (1 if prompt.messages else None)
        assert check_.drift_nats == (None if prompt.messages else 0.0)
    assert "prompt tokens moved at 1 of" in check_text([found])
    assert found.has_moved


def test_another_answer_moves_text_at_its_first_token(models: FakeModels, home: Path) -> None:
    def other(tokens: Any) -> int:
        return ord("#") if len(tokens) % 50 == 0 else endless_token(tokens)

    found = later(models, home, engine=lambda: FakeEngine(script=other))
    moved = [prompt for prompt in found.prompts if prompt.moves]
    assert len(moved) >= 5
    old = {entry["name"]: entry for entry in found.golden["entries"]}
    for prompt in moved:
        assert Move.TEXT in prompt.moves
        assert prompt.text_at == -len(old[prompt.name]["prompt_ids"]) % 50
        assert f"text moved at token {prompt.text_at} of 32, where the two likeliest were 1 nats" in prompt.sentence


def test_other_logits_move_logprobs_though_the_text_stays(models: FakeModels, home: Path) -> None:
    found = later(models, home, engine=lambda: FakeEngine(script=endless_token, noise=3.0))
    assert moves(found) == {Move.LOGPROBS}
    assert all(prompt.drift_nats and prompt.drift_nats > 0.8 for prompt in found.prompts)


def test_logits_that_drift_a_little_are_the_same(models: FakeModels, home: Path) -> None:
    found = later(models, home, engine=lambda: FakeEngine(script=endless_token, noise=1.02))
    assert not found.has_moved
    assert all(prompt.drift_nats and 0 < prompt.drift_nats < 0.8 for prompt in found.prompts)
    assert found.prompts[0].sentence.startswith("same, logprobs within 0.0")


STERN = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + TEMPLATE


def test_a_prompt_that_is_refused_or_answered_anew_has_moved(models: FakeModels, home: Path) -> None:
    found = later(models, home, template=STERN)
    assert [prompt.name for prompt in found.prompts if prompt.moves] == ["system"]
    assert moves(found) == {Move.REFUSAL}
    assert "  system: refused now: " in check_text([found])
    back = later(replace(models, template=STERN), home, template=TEMPLATE)
    assert moves(back) == {Move.REFUSAL}
    assert "answered now; it was refused: " in check_text([back])


def test_a_prompt_that_stays_refused_is_neither_moved_nor_the_same(models: FakeModels, home: Path) -> None:
    found = later(replace(models, template=STERN), home)
    assert not found.has_moved
    assert "  1 of 12 prompts refused, as before\n  11 of 12 prompts the same; " in check_text([found])


def test_a_model_without_a_template_goes_on_from_the_texts(models: FakeModels, home: Path) -> None:
    found = later(replace(models, template=None), home)
    assert not found.has_moved
    assert all(entry["refused"] == "" and entry["ids"] for entry in found.golden["entries"])
    assert later(replace(models, template=None), home, template=TEMPLATE).prompts[0].moves[0] is Move.PROMPT


def test_a_changed_file_is_told_apart_from_what_it_answers(models: FakeModels, home: Path) -> None:
    before, _ = record("m.gguf", bench(models, home))
    (models.folder / "m.gguf").write_bytes(b"GGUF and other weights")
    found = check("m.gguf", bench(models, home))
    assert found.is_another_file
    assert found.has_moved
    assert moves(found) == set()
    assert found.golden["model"]["id"] == before["model"]["id"] != found.model_id
    assert f"the model file is another one: sha256 {found.model_id[:12]}" in check_text([found])
    record("m.gguf", bench(models, home))
    assert not check("m.gguf", bench(models, home)).has_moved


def test_another_model_s_file_in_its_place_is_told_though_it_has_a_golden_too(models: FakeModels, home: Path) -> None:
    (models.folder / "other.gguf").write_bytes(b"GGUF and other weights")
    before, _ = record("m.gguf", bench(models, home))
    record("other.gguf", bench(models, home))
    (models.folder / "m.gguf").write_bytes(b"GGUF and other weights")
    found = check("m.gguf", bench(models, home))
    assert found.is_another_file
    assert found.golden["model"]["id"] == before["model"]["id"]
    assert not check("other.gguf", bench(models, home)).has_moved


def test_the_same_bytes_by_another_name_have_the_same_golden(models: FakeModels, home: Path) -> None:
    record("m.gguf", bench(models, home))
    (models.folder / "copy.gguf").write_bytes((models.folder / "m.gguf").read_bytes())
    assert not check("copy.gguf", bench(models, home)).has_moved


def test_a_golden_of_a_later_version_is_told_and_left_alone(models: FakeModels, home: Path) -> None:
    _, path = record("m.gguf", bench(models, home))
    later_ = path.read_text().replace('"version": 1', '"version": 2')
    path.write_text(later_)
    with pytest.raises(Unavailable, match="was written by a newer localllm") as caught:
        check("m.gguf", bench(models, home))
    assert caught.value.hint == "pip install -U localllm"
    assert path.read_text() == later_


def test_a_file_of_the_same_name_elsewhere_is_not_that_model(models: FakeModels, home: Path, tmp_path: Path) -> None:
    record("m.gguf", bench(models, home))
    (tmp_path / "m.gguf").write_bytes(b"GGUF of somebody else")
    with pytest.raises(ModelNotFound) as caught:
        check("m.gguf", bench(replace(models, folder=tmp_path), home))
    assert caught.value.hint == "localllm bench golden record m.gguf"


def test_the_newest_golden_of_a_name_counts(models: FakeModels, home: Path) -> None:
    shelf, ids = Shelf(Store(home)), []
    for number in (2, 1, 3):
        (models.folder / "m.gguf").write_bytes(b"GGUF %d" % number)
        kept, _ = record("m.gguf", bench(models, home))
        shelf.put(kept | {"recorded_at": f"2026-0{number}-01T00:00:00Z"})
        ids.append(kept["model"]["id"])
    (models.folder / "m.gguf").write_bytes(b"GGUF 4")
    assert check("m.gguf", bench(models, home)).golden["model"]["id"] == ids[2]


def test_settings_that_are_in_force_now_are_told(models: FakeModels, home: Path) -> None:
    found = later(models, home, settings={**SETTINGS, "n_gpu_layers": 0})
    assert found.settings == ("n_gpu_layers: 33, now 0",)
    assert not found.has_moved
    assert "    n_gpu_layers: 33, now 0\n" in check_text([found])


def test_a_changed_fingerprint_makes_it_stale(models: FakeModels, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = record("m.gguf", bench(models, home))
    now = json.loads(json.dumps(kept["fingerprint"]))
    assert is_stale(kept, now) == []
    now["software"]["llama-cpp-python"] = "0.3.99"
    was = kept["fingerprint"]["software"]["llama-cpp-python"]
    assert is_stale(kept, now) == [f"llama-cpp-python: {was}, now 0.3.99"]
    monkeypatch.setattr(golden, "fingerprint_now", lambda: now)
    found = check("m.gguf", bench(models, home))
    assert found.stale == (f"llama-cpp-python: {was}, now 0.3.99",)
    assert not found.has_moved
    assert check_document([found])["goldens"][0]["stale"] == list(found.stale)


def test_the_prompts_of_then_are_asked_whatever_is_shipped_now(models: FakeModels, home: Path) -> None:
    kept, _ = record("m.gguf", bench(models, home))
    kept["entries"] = kept["entries"][:3]
    bench(models, home).shelf.put(kept)
    assert [prompt.name for prompt in check("m.gguf", bench(models, home)).prompts] == [p.name for p in PROMPTS[:3]]


def test_a_damaged_golden_is_set_aside_and_there_is_none(models: FakeModels, home: Path) -> None:
    _, path = record("m.gguf", bench(models, home))
    path.write_bytes(path.read_bytes().replace(b'"same"', b"").replace(b"avx", b"xxx", 1)[:-10])
    with pytest.raises(ModelNotFound):
        check("m.gguf", bench(models, home))
    assert path.with_name(path.name + ".bad").exists()


def test_a_recording_that_fails_keeps_the_golden_that_is_there(models: FakeModels, home: Path) -> None:
    _, path = record("m.gguf", bench(models, home))
    before = path.read_bytes()
    broken = replace(models, engine=lambda: FakeEngine(script=endless_token, fail_forwards=range(200, 900)))
    with pytest.raises(Exception, match="fails here"):
        record("m.gguf", bench(broken, home))
    assert path.read_bytes() == before
    assert broken.engines[-1].closed


def stored(home: Path, names: list[str]) -> FakeModels:
    """Return the models of a store of these names."""
    store = Store(home)
    for name in names:
        put(store, name, b"GGUF " + name.encode())
    return FakeModels(home, source="store")


def by_store(models: FakeModels, home: Path) -> Callable[[str], Any]:
    def find(model: str) -> Any:
        found = Store(home).get(model)
        assert found is not None
        file, info = FakeModels.find(models, str(found.path.relative_to(home)))
        return replace(file, name=model), info

    return find


def test_all_goldens_of_the_store_are_checked_and_one_that_fails_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = stored(home, ["a", "b", "c"])
    monkeypatch.setattr(models, "find", by_store(models, home))
    with pytest.raises(ModelNotFound) as caught:
        check_all(bench(models, home), Store(home))
    assert caught.value.exit_code == 3
    for name in ("a", "c"):
        record(name, bench(models, home))
    checks = check_all(bench(models, home), Store(home))
    assert [(one.golden["model"]["name"], one.has_moved) for one in checks] == [("a", False), ("c", False)]
    models.failure = ModelRefused("it is not supported any more")
    checks = check_all(bench(models, home), Store(home))
    assert [one.has_moved for one in checks] == [True, True]
    assert "cannot be asked any more: it is not supported any more" in check_text(checks)
    assert check_document(checks)["goldens"][0]["failed"] == "it is not supported any more"
