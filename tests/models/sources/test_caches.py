"""The folders of other tools are read as they are, whatever is in them, and never written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from localllm.models.sources.caches import CachedModel, find_all, folders

GGUF = b"GGUF data"
SHA = "5" * 64


@pytest.fixture
def home(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return isolated_home


def put(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def ours(home: Path) -> list[CachedModel]:
    return [model for model in find_all() if home in model.path.parents]


def test_a_hub_cache_gives_names_and_hashes(home: Path) -> None:
    repo = home / ".cache" / "huggingface" / "hub" / "models--org--repo--with--dashes"
    blob = put(repo / "blobs" / SHA)
    for commit in ("a" * 40, "b" * 40):
        link = repo / "snapshots" / commit / "Q8_0" / "m-Q8_0.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    put(repo / "refs" / "main", b"b" * 40)
    put(repo / "snapshots" / ("a" * 40) / "mmproj-F16.gguf")
    (model,) = ours(home)
    assert (model.name, model.sha256, model.quant) == ("org/repo--with--dashes:Q8_0", SHA, "Q8_0")
    assert "b" * 40 in model.path.parts
    assert model.size_bytes == len(GGUF)


def test_llama_cpp_and_lm_studio(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / "llama" / "org_repo_m-Q4_0.gguf")
    put(home / "llama" / "org_repo_m-Q4_0.gguf.json", b"{}")
    put(home / "llama" / "org_repo_n-Q4_0.gguf.downloadInProgress")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "llama"))
    put(home / ".lmstudio" / "models" / "org" / "repo" / "m-Q6_K-00001-of-00002.gguf")
    put(home / ".lmstudio" / "models" / "org" / "repo" / "m-Q6_K-00002-of-00002.gguf")
    put(home / ".cache" / "lm-studio" / "models" / "org" / "half" / "m-Q6_K-00001-of-00002.gguf")
    found = {model.name: model for model in ours(home)}
    assert set(found) == {"org_repo_m-Q4_0", "org/repo:Q6_K"}
    assert found["org_repo_m-Q4_0"].source == "llama.cpp cache"
    assert len(found["org/repo:Q6_K"].files) == 2


def ollama(home: Path, where: str, digest: str, media: str = "application/vnd.ollama.image.model") -> Path:
    manifest = {"layers": [{"mediaType": media, "digest": digest, "size": 1}, {"mediaType": "x", "digest": "y"}]}
    return put(home / ".ollama" / "models" / "manifests" / where, json.dumps(manifest).encode())


def test_ollama_models_are_found_by_their_manifest(home: Path) -> None:
    put(home / ".ollama" / "models" / "blobs" / f"sha256-{SHA}")
    ollama(home, "registry.ollama.ai/library/qwen3/0.6b", f"sha256:{SHA}")
    (model,) = ours(home)
    assert (model.name, model.sha256, model.source) == ("ollama:qwen3:0.6b", SHA, "Ollama")
    put(home / ".ollama" / "models" / "blobs" / f"sha256-{'6' * 64}")
    ollama(home, "hf.co/org/repo/Q8_0", f"sha256:{'6' * 64}")
    assert {model.name for model in ours(home)} == {"ollama:qwen3:0.6b", "ollama:hf.co/org/repo:Q8_0"}


@pytest.mark.parametrize(
    "digest",
    [
        *("sha256:../../../../etc/passwd", "sha256:" + "g" * 64, "sha256:" + "5" * 63, "sha256:" + "5" * 64 + "\n"),
        *("sha1:" + "5" * 64, "SHA256:" + "5" * 64, f"sha256-{SHA}", "sha256:" + "5" * 64 + "/../x", ""),
    ],
)
def test_a_digest_that_is_none_leads_nowhere(home: Path, digest: str) -> None:
    put(home / ".ollama" / "models" / "blobs" / f"sha256-{SHA}")
    ollama(home, "registry.ollama.ai/library/m/t", digest)
    assert ours(home) == []


def test_broken_manifests_and_blobs_are_skipped(home: Path) -> None:
    put(home / ".ollama" / "models" / "blobs" / f"sha256-{SHA}")
    ollama(home, "registry.ollama.ai/library/good/t", f"sha256:{SHA}")
    base = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library"
    broken = (b"", b"{", b"[]", b"null", b'{"layers": 5}', b'{"layers": [5]}', b"[" * 10_000, b"\xff")
    for number, content in enumerate(broken):
        put(base / f"bad{number}" / "t", content)
    ollama(home, "registry.ollama.ai/library/gone/t", "sha256:" + "7" * 64)
    put(home / ".ollama" / "models" / "blobs" / f"sha256-{'8' * 64}", b"not a model")
    ollama(home, "registry.ollama.ai/library/other/t", "sha256:" + "8" * 64)
    (base / "circle").symlink_to(base)
    os.mkfifo(base / "good" / "pipe")
    assert [model.name for model in ours(home)] == ["ollama:good:t"]


def test_odd_folders_do_no_harm(home: Path) -> None:
    hub = home / ".cache" / "huggingface" / "hub"
    put(hub / "models--org--repo", b"a file")
    put(hub / "models--noslash" / "snapshots" / "c" / "m.gguf")
    put(hub / "models--org--ok" / "snapshots" / "c" / "m-Q8_0.gguf")
    circle = hub / "models--org--ok" / "snapshots" / "c" / "circle.gguf"
    circle.symlink_to(circle)
    (hub / "models--org--ok" / "snapshots" / "d").symlink_to(hub)
    (hub / "models--org--ok" / "snapshots" / "c" / "gone.gguf").symlink_to(hub / "nowhere")
    assert [model.name for model in ours(home)] == ["org/ok:Q8_0"]


def test_nothing_is_written_and_missing_folders_are_not_made(home: Path) -> None:
    before = sorted(home.rglob("*"))
    find_all()
    assert sorted(home.rglob("*")) == before
    assert [one for one in folders() if home in one.path.parents] == []
