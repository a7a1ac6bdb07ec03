"""What a reference to the hub picks, what the environment says, and what refusals tell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import DownloadFailed, HashMismatch, LocalLLMError, ModelNotFound, UsageError
from localllm.models import catalog, sources
from localllm.models.catalog import CatalogEntry
from localllm.models.filenames import group
from localllm.models.reference import Alias, HubRef, LocalPath, StoredName
from localllm.models.sources import pull, pulling
from localllm.models.sources.hub import HubSource
from localllm.models.sources.hub_lookup import HubSettings, choose_set
from localllm.models.sources.progress import Meter, Phase, PullProgress
from localllm.models.store import Store
from tests.fake_hub import FakeHub, Fault, gguf_bytes
from tests.models.sources.conftest import DATA, REPO

Make = Callable[..., HubSource]


def chosen(ref: HubRef, *names: str) -> str:
    return choose_set(ref, group(names)).stem


def test_the_default_quantisation_is_taken_and_side_files_are_not() -> None:
    names = ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf", "m-imatrix.gguf", "README.md")
    assert chosen(HubRef("o/r"), *names) == "m-Q4_K_M"
    assert chosen(HubRef("o/r", quant="Q8_0"), *names) == "m-Q8_0"


def test_without_a_wish_the_only_model_is_taken() -> None:
    assert chosen(HubRef("o/r"), "m-Q8_0.gguf", "mmproj-m.gguf") == "m-Q8_0"


@pytest.mark.parametrize(
    ("ref", "names", "error", "match"),
    [
        (HubRef("o/r"), ["m-Q8_0.gguf", "m-Q2_K.gguf"], ModelNotFound, "no Q4_K_M; it has: Q2_K, Q8_0"),
        (HubRef("o/r", quant="Q4_K"), ["m-Q4_K_M.gguf"], ModelNotFound, "no Q4_K; it has: Q4_K_M"),
        (HubRef("o/r"), ["model.safetensors"], ModelNotFound, "no GGUF"),
        (HubRef("o/r"), ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], UsageError, "several models"),
        (HubRef("o/r"), ["m-Q4_K_M-00001-of-00002.gguf"], ModelNotFound, "lacks parts"),
    ],
)
def test_what_cannot_be_picked_says_what_there_is(
    ref: HubRef, names: list[str], error: type[LocalLLMError], match: str
) -> None:
    with pytest.raises(error, match=match):
        choose_set(ref, group(names))


def test_one_of_several_models_is_picked_by_its_own_name() -> None:
    assert chosen(HubRef("o/r", quant="B-Q4_K_M"), "a-Q4_K_M.gguf", "b-Q4_K_M.gguf") == "b-Q4_K_M"


def test_a_revision_is_asked_for_and_kept_apart(hub: FakeHub, store: Store, source: Make) -> None:
    commit = hub.commit(REPO)
    model = pulling.run(source(HubRef(REPO, commit)), store, None)
    assert (model.name, model.revision) == (f"{REPO}:Q4_K_M:{commit}", commit)
    with pytest.raises(ModelNotFound, match="no revision v9"):
        pulling.run(source(HubRef(REPO, "v9")), store, None)
    with pytest.raises(ModelNotFound, match="no repository"):
        pulling.run(source(HubRef("org/none")), store, None)


def test_a_new_commit_of_the_branch_is_fetched_and_the_old_file_goes(hub: FakeHub, store: Store, source: Make) -> None:
    pulling.run(source(), store, None)
    newer = gguf_bytes(300_000, seed=9)
    hub.add(REPO, {"model-Q4_K_M.gguf": newer})
    model = pulling.run(source(), store, None)
    assert model.path.read_bytes() == newer
    assert sorted(path.suffix for path in model.folder.iterdir()) == [".gguf", ".json"]


def test_a_gated_repository_says_how_to_get_in(hub: FakeHub, store: Store, source: Make) -> None:
    hub.faults["api"] = [Fault("status", status=403, headers={"X-Error-Code": "GatedRepo"})]
    with pytest.raises(ModelNotFound, match="gated") as caught:
        pulling.run(source(), store, None)
    assert "HF_TOKEN" in caught.value.hint


def test_a_busy_hub_is_asked_again(hub: FakeHub, store: Store, source: Make) -> None:
    hub.faults["api"] = [Fault("status", status=429), Fault("status", status=503)]
    assert pulling.run(source(), store, None).path.read_bytes() == DATA
    hub.faults["api"] = [Fault("status", status=503)] * 9
    with pytest.raises(DownloadFailed, match="503"):
        pulling.run(source(), store, None)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"id": "x"}', b"<html>", b'{"id": "a/b", "sha": "x", "siblings": []}']
)
def test_an_answer_without_sense_is_a_sentence(
    hub: FakeHub, store: Store, source: Make, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("tests.fake_hub.json.dumps", lambda _: answer.decode())
    with pytest.raises(DownloadFailed):
        pulling.run(source(), store, None)


@pytest.mark.parametrize(
    "name", [".hidden-Q4_K_M.gguf", "a\\b-Q4_K_M.gguf", "a:b-Q4_K_M.gguf", "x" * 230 + "-Q4_K_M.gguf"]
)
def test_a_file_name_that_is_not_safe_is_refused(hub: FakeHub, store: Store, source: Make, name: str) -> None:
    hub.add("org/odd", {name: DATA})
    with pytest.raises(DownloadFailed, match="not safe"):
        pulling.run(source(HubRef("org/odd")), store, None)


def test_a_path_in_the_repository_leaves_only_its_file_name(hub: FakeHub, store: Store, source: Make) -> None:
    hub.add("org/deep", {"../../../evil/m-Q4_K_M.gguf": DATA})
    hub.faults["resolve"] = [Fault("redirect", location=f"/cdn/{hashlib.sha256(DATA).hexdigest()}")]
    model = pulling.run(source(HubRef("org/deep")), store, None)
    assert model.path == model.folder / "m-Q4_K_M.gguf"
    assert model.folder.parent == store.models


def test_the_environment_is_read(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_saved\n")
    assert HubSettings.from_environment({"HF_HOME": str(tmp_path)}) == HubSettings(
        "https://huggingface.co", False, "hf_saved", False
    )
    mirror = {"HF_ENDPOINT": "http://mirror/", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "yes"}
    assert HubSettings.from_environment(mirror) == HubSettings("http://mirror", True, None, True)
    assert HubSettings.from_environment({**mirror, "HF_TOKEN": " hf_own "}).token == "hf_own"
    implicit = {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    assert HubSettings.from_environment(implicit).token is None


def test_a_catalog_name_is_pinned_to_revision_and_hash(
    hub: FakeHub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(DATA).hexdigest()
    entry = CatalogEntry(
        "fake:1", f"hf:{REPO}:Q4_K_M", hub.commit(REPO), sha256, len(DATA), "1", "Q4_K_M", "MIT", 1, ""
    )
    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    model = pull("fake:1", store)
    assert (model.name, model.sha256, model.revision) == ("fake:1", sha256, hub.commit(REPO))
    assert model.source == f"hf:{REPO}@{hub.commit(REPO)}:Q4_K_M"
    wrong = CatalogEntry("fake:2", entry.reference, entry.revision, "0" * 64, len(DATA), "1", "Q4_K_M", "MIT", 1, "")
    monkeypatch.setattr(catalog, "CATALOG", (wrong,))
    with pytest.raises(HashMismatch, match="the catalog promises"):
        pull("fake:2", store)
    assert [one.name for one in store.list()] == ["fake:1"]


def test_only_what_can_be_fetched_is_pulled() -> None:
    with pytest.raises(UsageError, match="used where it is") as caught:
        sources.source_of(LocalPath("./m.gguf"))
    assert caught.value.hint == "localllm run ./m.gguf"
    with pytest.raises(ModelNotFound) as missing:
        sources.source_of(StoredName("org/repo:Q8_0"))
    assert missing.value.hint == "localllm pull hf:org/repo:Q8_0"
    with pytest.raises(ModelNotFound, match="smollm2:135m"):
        sources.source_of(StoredName("nothing"))
    for entry in catalog.CATALOG:
        assert sources.source_of(Alias(entry.alias)).name == entry.alias


def test_a_file_that_is_no_gguf_is_refused_after_its_hash_was_right(hub: FakeHub, store: Store, source: Make) -> None:
    hub.add("org/bad", {"m.gguf": b"not a model at all"})
    with pytest.raises(LocalLLMError) as caught:
        pulling.run(source(HubRef("org/bad")), store, None)
    assert caught.value.exit_code == 3
    assert store.list() == []
    store.remove("org/bad:Q4_K_M")
    assert store.unfinished() == ()


def test_facts_of_the_header_complete_those_of_the_hub(hub: FakeHub, store: Store, source: Make) -> None:
    header = {"general.quantized_by": "Someone", "quantize.imatrix.dataset": "words.txt", "general.license": "mit"}
    hub.add("org/told", {"m.gguf": gguf_bytes(50_000, **header)})
    model = pulling.run(source(HubRef("org/told")), store, None)
    assert (model.quantiser, model.imatrix, model.license) == ("Someone", "words.txt", "mit")


def test_a_meter_reports_at_most_ten_times_a_second_and_the_end() -> None:
    now = 0.0
    seen: list[PullProgress] = []
    meter = Meter(seen.append, clock=lambda: now)
    meter.start(Phase.FETCHING, "m", 1000)
    for step in range(1, 1001):
        now += 0.001
        meter.at(step)
    assert 10 <= len(seen) <= 13
    assert seen[-1].done_bytes == 1000
    assert 900 < seen[-1].bytes_per_s < 1100
    meter.at(10)
    assert seen[-1].done_bytes == 1000
