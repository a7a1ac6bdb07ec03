"""What tells one build of the library from another of the same version."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.backends.llamacpp import bindings


def checksum_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    library = SimpleNamespace(api=SimpleNamespace(_lib=SimpleNamespace(_name=str(folder / "libllama.so"))))
    monkeypatch.setattr(bindings, "load", lambda: library)
    return bindings.kernels_checksum.__wrapped__()


def test_other_kernels_of_the_same_version_have_another_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "libggml-cpu.so"
    kernels.write_bytes(b"built with one set of flags")
    first = checksum_of(tmp_path, monkeypatch)
    kernels.write_bytes(b"built with other flags here")
    second = checksum_of(tmp_path, monkeypatch)
    kernels.write_bytes(b"built with one set of flags")
    assert first == checksum_of(tmp_path, monkeypatch) != second


def test_links_beside_the_library_and_what_is_no_kernel_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libggml-cpu.so").write_bytes(b"kernels")
    first = checksum_of(tmp_path, monkeypatch)
    for name in ("libggml-cpu.so.0", "libllama.so", "ggml.cmake"):
        (tmp_path / name).write_bytes(b"more")
    assert checksum_of(tmp_path, monkeypatch) == first


def test_of_huge_kernels_the_size_and_the_beginning_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, n_head = tmp_path / "ggml-cuda.dll", 4 << 20
    kernels.write_bytes(bytes(n_head + 1))
    prints = {checksum_of(tmp_path, monkeypatch)}
    kernels.write_bytes(bytes(n_head + 2))
    prints.add(checksum_of(tmp_path, monkeypatch))
    kernels.write_bytes(bytes(n_head - 1) + b"\1\0\0")
    prints.add(checksum_of(tmp_path, monkeypatch))
    assert len(prints) == 3
