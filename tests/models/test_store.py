"""The store: listing and removing survive anything found in it, publishing is old or new."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import ModelNotFound, UsageError
from localllm.models import provenance
from localllm.models.disk import files, lock
from localllm.models.provenance import Provenance, StoredFile
from localllm.models.store import Store, StoredModel, check_name, default_home, folder_of
from tests.failing import FailingCalls


def put(store: Store, name: str, *contents: bytes, revision: str = "r1") -> StoredModel:
    """Publish a model of these parts, as a pull does."""
    staging = store.staging(name)
    total = len(contents)
    stored = []
    for number, content in enumerate(contents, 1):
        file = "m-Q8_0.gguf" if total == 1 else f"m-Q8_0-{number:05d}-of-{total:05d}.gguf"
        (staging / file).write_bytes(content)
        stored.append(StoredFile(file, len(content), hashlib.sha256(content).hexdigest()))
    facts = Provenance(
        name, f"hf:{name}", revision, "mit", "Q8_0", "someone", None, "2026-01-01T00:00:00Z", tuple(stored)
    )
    return store.publish(staging, facts)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "Modelle ü 山 (1).")


def test_a_published_model_is_listed_with_its_facts(store: Store) -> None:
    model = put(store, "org/repo:Q8_0", b"GGUF one")
    assert store.list() == [model]
    assert store.get("org/repo:Q8_0") == model
    assert (model.name, model.quant, model.license, model.problem) == ("org/repo:Q8_0", "Q8_0", "mit", "")
    assert model.sha256 == hashlib.sha256(b"GGUF one").hexdigest()
    assert model.path.read_bytes() == b"GGUF one"
    assert not list(store.partial.iterdir())


def test_a_new_pull_replaces_the_old_files(store: Store) -> None:
    put(store, "a:b", b"old", revision="r1")
    model = put(store, "a:b", b"newer", revision="r2")
    assert (model.revision, model.path.read_bytes()) == ("r2", b"newer")
    assert sorted(path.name for path in model.folder.iterdir()) == sorted([model.path.name, provenance.FILE_NAME])
    assert put(store, "a:b", b"x", b"yy").files[1].read_bytes() == b"yy"
    assert len(store.list()) == 1


def test_replacing_shows_the_old_or_the_new_at_every_failing_step(store: Store) -> None:
    calls = FailingCalls()
    put(store, "a:b", b"old")
    for fail_at in range(1, 60):
        old, new = store.list()[0].path.read_bytes(), b"new %d" % fail_at
        with calls.at(fail_at, "write", "fsync", "replace", "rename", "unlink"), contextlib.suppress(OSError):
            put(store, "a:b", new)
        (model,) = store.list()
        assert model.problem == ""
        assert model.path.read_bytes() in (old, new)
        if calls.n_calls < fail_at:
            break
    assert 5 < fail_at < 59


RUBBISH: dict[str, Callable[[Path], object]] = {
    "no provenance": lambda folder: (folder / provenance.FILE_NAME).unlink(),
    "empty provenance": lambda folder: (folder / provenance.FILE_NAME).write_bytes(b""),
    "half a provenance": lambda folder: os.truncate(folder / provenance.FILE_NAME, 100),
    "garbage": lambda folder: (folder / provenance.FILE_NAME).write_bytes(os.urandom(5000)),
    "folder as provenance": lambda folder: replace_by_folder(folder / provenance.FILE_NAME),
    "link as provenance": lambda folder: replace_by_link(folder / provenance.FILE_NAME, Path("/etc/passwd")),
    "file missing": lambda folder: (folder / "m-Q8_0.gguf").unlink(),
    "file cut": lambda folder: os.truncate(folder / "m-Q8_0.gguf", 1),
    "folder as file": lambda folder: replace_by_folder(folder / "m-Q8_0.gguf"),
    "link as file": lambda folder: replace_by_link(folder / "m-Q8_0.gguf", Path("/etc/passwd")),
    "circle of links": lambda folder: replace_by_link(folder / "m-Q8_0.gguf", folder / "m-Q8_0.gguf"),
    "everything gone": lambda folder: [path.unlink() for path in folder.iterdir()],
    "strangers": lambda folder: [(folder / name).write_bytes(b"x") for name in ("a.gguf", "b.gguf", "\udcff.txt")],
}


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_rubbish_blocks_neither_listing_nor_removing(store: Store, rubbish: str) -> None:
    put(store, "good:1", b"GGUF good")
    bad = put(store, "bad:1", b"GGUF bad")
    RUBBISH[rubbish](bad.folder)
    found = {model.folder: model for model in store.list()}
    assert len(found) == 2
    assert found[bad.folder].sha256 is None or rubbish == "strangers"
    assert store.list() == store.list()
    store.remove(bad.folder.name)
    assert [model.name for model in store.list()] == ["good:1"]
    assert not bad.folder.exists()


def test_every_truncation_of_a_provenance_leaves_a_usable_model(store: Store) -> None:
    model = put(store, "a:b", b"GGUF data")
    path = model.folder / provenance.FILE_NAME
    whole = path.read_bytes()
    rng = random.Random(3)
    for _ in range(60):
        bad = bytearray(whole)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad if rng.random() < 0.5 else whole[: rng.randrange(len(whole))])
        (found,) = store.list()
        assert found.path.read_bytes() == b"GGUF data"
        assert found.problem == ""
        assert (found.sha256 is None) == (found.name != "a:b")


def test_a_provenance_copied_from_another_model_is_not_believed(store: Store) -> None:
    first, second = put(store, "a:1", b"GGUF one"), put(store, "a:2", b"GGUF two")
    (second.folder / provenance.FILE_NAME).write_bytes((first.folder / provenance.FILE_NAME).read_bytes())
    assert {model.sha256 for model in store.list()} == {first.sha256, None}


def test_a_provenance_cannot_name_files_outside_its_folder(store: Store, tmp_path: Path) -> None:
    model = put(store, "a:1", b"GGUF one")
    for name in ("../../outside", "/etc/passwd", ".hidden", "a\0b"):
        facts = Provenance("a:1", "s", None, None, None, None, None, "t", (StoredFile(name, 1, "0" * 64),))
        provenance.save(model.folder, facts)
        (found,) = store.list()
        assert found.sha256 is None
        assert found.path.parent == model.folder


def test_odd_things_among_the_models_are_passed_over(store: Store, tmp_path: Path) -> None:
    put(store, "a:1", b"GGUF one")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "m.gguf").write_bytes(b"GGUF")
    (store.models / "link").symlink_to(outside)
    (store.models / "circle").symlink_to(store.models / "circle")
    (store.models / "file").write_text("x")
    os.mkfifo(store.models / "pipe")
    assert [model.name for model in store.list()] == ["a:1"]


def test_removing_never_follows_a_link(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    model = put(store, "a:1", b"GGUF one")
    (model.folder / "link").symlink_to(outside)
    (model.folder / "sub").mkdir()
    (model.folder / "sub" / "link").symlink_to(outside / "precious")
    store.remove("a:1")
    assert (outside / "precious").read_text() == "x"
    assert store.list() == []
    assert not list((store.home / "trash").iterdir())


def test_names_are_found_whole_or_by_a_unique_part(store: Store) -> None:
    for name in ("org/Qwen3-4B-GGUF:Q4_K_M", "org/Qwen3-8B-GGUF:Q4_K_M", "smollm2:135m"):
        put(store, name, name.encode())
    assert (found := store.find("QWEN3-4b")) is not None
    assert found.name == "org/Qwen3-4B-GGUF:Q4_K_M"
    assert store.find("llama") is None
    with pytest.raises(UsageError, match="fits 2 models: org/Qwen3-4B-GGUF:Q4_K_M, org/Qwen3-8B-GGUF:Q4_K_M"):
        store.find("qwen")
    with pytest.raises(UsageError):
        store.remove("qwen")
    with pytest.raises(ModelNotFound):
        store.remove("llama")
    store.remove("smollm")
    assert len(store.list()) == 2


def test_an_unfinished_pull_is_listed_apart_and_can_be_removed(store: Store) -> None:
    (store.staging("a:1") / "m.gguf.part").write_bytes(b"x" * 100)
    assert store.list() == []
    assert [one.size_bytes for one in store.unfinished()] == [100]
    store.remove("a:1")
    assert store.unfinished() == ()


HOLD = "import sys; from pathlib import Path; from localllm.models.store import Store\n\
with Store(Path(sys.argv[1])).locked(sys.argv[2], print):\n    print('held', flush=True); sys.stdin.read()"


def test_a_model_being_pulled_is_not_removed_and_a_dead_owner_holds_nothing(store: Store) -> None:
    put(store, "a:1", b"GGUF one")
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store.home), "a:1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(lock.Busy, match=f"process {owner.pid} "):
        store.remove("a:1")
    assert len(store.list()) == 1
    owner.kill()
    owner.communicate()
    store.remove("a:1")
    assert store.list() == []


def test_a_read_only_store_is_still_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = put(store, "a:1", b"GGUF one")
    (model.folder / provenance.FILE_NAME).write_bytes(b"bad")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    for name in ("replace", "rename", "unlink", "write"):
        monkeypatch.setattr(files.os, name, refuse)
    assert len(store.list()) == 1


HOSTILE = [
    *(
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "a//b",
        "/a",
        "a/",
        "%2e%2e/x y",
        "a\0b",
        "a\\b",
        "C:\\x",
        "x" * 201,
        "ü",
        "a b",
    ),
    *("\u202egguf", "a\nb", "CON\\", "~root$", "a*b", "a?b", "-rf;", "a|b", "${HOME}", "`id`"),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_could_leave_the_store_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


def test_folder_names_are_safe_and_never_shared() -> None:
    names = ["a/b:c", "a-b-c", "a:b/c", "A/b:c", "...", "-", "org/repo:Q4_K_M", "CON", "x" * 200]
    folders = [folder_of(name) for name in names]
    assert len({folder.lower() for folder in folders}) == len(names)
    assert all(len(folder) <= 120 and "/" not in folder and not folder.startswith(".") for folder in folders)


def test_the_home_can_be_moved_and_a_missing_one_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "x" / ".." / "y"))
    assert default_home() == tmp_path / "y"
    monkeypatch.delenv("LOCALLLM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    if sys.platform == "linux":
        assert default_home() == tmp_path / "data" / "localllm"
    monkeypatch.setenv("LOCALLLM_HOME", "~nobody-of-this-name/x")
    with pytest.raises(UsageError, match="no home folder"):
        default_home()
    monkeypatch.delenv("LOCALLLM_HOME")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.delenv("HOME")
    assert default_home().is_absolute()


def test_a_store_where_a_file_stands_lists_nothing_and_says_so_when_pulling(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    store = Store(tmp_path / "home")
    assert store.list() == []
    assert store.unfinished() == ()
    with pytest.raises(OSError), store.locked("a:1", lambda _: None):
        pass
