"""From what was typed to files on this machine: paths of every kind, stored models, aliases, other caches."""

from __future__ import annotations

import os
import shlex
import unicodedata
from pathlib import Path

import pytest

from localllm.errors import LocalLLMError, ModelNotFound, ModelRefused, UsageError
from localllm.models import hashes
from localllm.models.resolve import resolve
from localllm.models.store import Store
from tests.models.test_store import put

GGUF = b"GGUF data"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


NAMES = ["m.gguf", "Modelle ü 山 (1)/m.gguf", "trailing./m.gguf", " spaces .gguf", "x" * 245 + ".gguf", "a'b\"c.gguf"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_used_in_place_however_it_is_called(store: Store, here: Path, name: str) -> None:
    path = here / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(GGUF)
    for text in (str(path), f"./{name}"):
        found = resolve(text, store)
        assert (found.path, found.files, found.source) == (path, (path,), "file")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_are_compared_composed(store: Store, here: Path, form: str) -> None:
    other = "NFD" if form == "NFC" else "NFC"
    path = here / unicodedata.normalize(form, "Äpfel") / unicodedata.normalize(form, "ü-é.gguf")
    path.parent.mkdir()
    path.write_bytes(GGUF)
    typed = "./" + unicodedata.normalize(other, "Äpfel/ü-é.gguf")
    assert os.path.samefile(resolve(typed, store).path, path)


@pytest.mark.parametrize("name", ["a b.gguf", "$(touch pwned).gguf", "it's; rm -rf x.gguf"])
def test_a_hint_runs_what_it_names_and_nothing_else(tmp_path: Path, store: Store, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound) as refused:
        resolve(str(tmp_path / "other.gguf"), store)
    assert shlex.split(refused.value.hint) == ["localllm", "run", str(tmp_path / name)]


def test_a_vanished_working_folder_is_a_sentence(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ModelNotFound, match="gone"):
        resolve("./m.gguf", store)


def test_a_tilde_is_the_home_folder(store: Store, isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (isolated_home / "m.gguf").write_bytes(GGUF)
    assert resolve("~/m.gguf", store).path == isolated_home / "m.gguf"
    with pytest.raises(UsageError, match="no home folder"):
        resolve("~nobody-of-this-name/m.gguf", store)
    monkeypatch.delenv("HOME")
    with pytest.raises(LocalLLMError):
        resolve("~/no-such-model-anywhere.gguf", store)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("./none.gguf", ModelNotFound, "there is no"),
        ("none.gguf", ModelNotFound, "there is no"),
        ("./circle.gguf", ModelNotFound, "circle"),
        ("./broken.gguf", ModelNotFound, "No such file"),
        ("./" + "x" * 300 + ".gguf", ModelNotFound, "too long"),
        ("./m.gguf/inside.gguf", ModelNotFound, "is a file, not a folder"),
        ("./pipe.gguf", ModelRefused, "neither a file nor a folder"),
        ("./empty", ModelNotFound, "holds no GGUF"),
        ("./two", UsageError, r"holds 2 models: a\.gguf, b\.gguf"),
        ("./part", ModelRefused, "lacks 2 of the set's parts"),
        ("./part/m-00002-of-00003.gguf", ModelRefused, "lacks 2"),
        ("./above", ModelNotFound, "the folders below below it do"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(
    store: Store, here: Path, text: str, error: type[LocalLLMError], match: str
) -> None:
    (here / "m.gguf").write_bytes(GGUF)
    (here / "circle.gguf").symlink_to(here / "circle.gguf")
    (here / "broken.gguf").symlink_to(here / "gone")
    os.mkfifo(here / "pipe.gguf")
    for name in ("empty/README", "two/a.gguf", "two/b.gguf", "part/m-00002-of-00003.gguf", "above/below/m.gguf"):
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_bytes(GGUF)
    with pytest.raises(error, match=match) as caught:
        resolve(text, store)
    assert caught.value.exit_code in (2, 3)
    assert caught.value.hint


def test_a_folder_with_one_model_is_that_model(store: Store, here: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "README.md"):
        (here / name).write_bytes(GGUF)
    for text in (".", str(here), "./m-00002-of-00002.gguf"):
        found = resolve(text, store)
        assert [path.name for path in found.files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
        assert found.path == found.files[0]


def test_a_link_keeps_its_own_folder(store: Store, here: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(GGUF)
    (here / "m.gguf").symlink_to(tmp_path / "blob")
    assert resolve("./m.gguf", store).path == here / "m.gguf"


def test_a_hash_is_told_where_it_is_known_and_never_computed(store: Store, here: Path) -> None:
    path = here / "m.gguf"
    path.write_bytes(GGUF)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    assert resolve("./m.gguf", store).sha256 is None
    digest = hashes.sha256_of(path, store)
    assert resolve("./m.gguf", store).sha256 == digest


def test_the_file_of_a_stored_model_has_the_hash_that_was_checked_when_it_came(store: Store, here: Path) -> None:
    model = put(store, "org/model", b"GGUF of it")
    assert resolve(str(model.path), store).sha256 == model.sha256 is not None
    (here / "link.gguf").symlink_to(model.path)
    assert resolve("./link.gguf", store).sha256 == model.sha256
    other = model.folder / "other.gguf"
    other.write_bytes(GGUF)
    assert resolve(str(other), store).sha256 is None
    model.path.write_bytes(b"GGUF of another length, written over it")
    assert resolve(str(model.path), store).sha256 is None


def test_the_file_of_a_stored_model_is_called_as_that_is(store: Store, here: Path) -> None:
    model = put(store, "org/model", b"GGUF of it")
    assert resolve(str(model.path), store).name == resolve("org/model", store).name == "org/model"
    assert resolve(str(model.path), store).path == model.path


def test_a_stored_model_is_found_by_name_part_or_reference(store: Store, here: Path) -> None:
    model = put(store, "org/Qwen3-4B-GGUF:Q8_0", GGUF)
    for text in ("org/Qwen3-4B-GGUF:Q8_0", "qwen", "hf:org/Qwen3-4B-GGUF:Q8_0"):
        found = resolve(text, store)
        assert (found.name, found.path, found.sha256, found.source) == (model.name, model.path, model.sha256, "store")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("hf:org/other:Q8_0", "localllm pull hf:org/other:Q8_0"),
        ("pypi:some-model", "localllm pull pypi:some-model"),
        ("smollm2:135m", "localllm pull smollm2:135m"),
        ("smollm2", "localllm pull smollm2:135m"),
        ("org/other", "localllm pull hf:org/other"),
        ("nothing", "localllm ls"),
        ("x", "localllm ls"),
        ("oss", "localllm pull gpt-oss:20b"),
        ("smolm2:135m", "localllm pull smollm2:135m"),
        ("here-it-is", "localllm run ./here-it-is"),
    ],
)
def test_what_is_not_here_comes_with_the_command_that_helps(store: Store, here: Path, text: str, hint: str) -> None:
    (here / "here-it-is").mkdir()
    with pytest.raises(ModelNotFound) as caught:
        resolve(text, store)
    assert caught.value.hint == hint


def test_a_misspelt_name_is_told_from_the_right_one(store: Store, here: Path) -> None:
    put(store, "org/Qwen3-4B:Q8_0", GGUF)
    with pytest.raises(ModelNotFound) as caught:
        resolve("org/Qwen-4B:Q8_0", store)
    assert caught.value.hint == "did you mean org/Qwen3-4B:Q8_0?"
    put(store, "smollm2:135m", GGUF)
    with pytest.raises(ModelNotFound) as caught:
        resolve("Smolm2:135m", store)
    assert caught.value.hint == "did you mean smollm2:135m?"


def test_several_that_fit_are_named(store: Store, here: Path) -> None:
    put(store, "org/Qwen3-4B:Q8_0", GGUF)
    put(store, "org/Qwen3-8B:Q8_0", GGUF)
    with pytest.raises(UsageError, match="Qwen3-4B:Q8_0, org/Qwen3-8B:Q8_0"):
        resolve("qwen3", store)


def test_a_damaged_stored_model_says_what_is_wrong(store: Store, here: Path) -> None:
    model = put(store, "org/repo:Q8_0", GGUF)
    os.truncate(model.path, 3)
    with pytest.raises(ModelRefused, match="has 3 bytes") as caught:
        resolve("org/repo:Q8_0", store)
    assert caught.value.hint == "localllm pull hf:org/repo:Q8_0"


def test_a_hub_reference_is_found_in_another_tools_cache(
    store: Store, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = here / "hub" / "models--org--repo" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q4_K_M.gguf").write_bytes(GGUF)
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    for text in ("hf:org/repo", "hf:org/repo@" + "a" * 40, "org/repo"):
        found = resolve(text, store)
        assert (found.path, found.source) == (snapshot / "m-Q4_K_M.gguf", "Hugging Face cache")
    with pytest.raises(ModelNotFound):
        resolve("hf:org/repo@" + "b" * 40, store)
    assert sorted(os.listdir(snapshot)) == ["m-Q4_K_M.gguf"]
