"""`localllm doctor`: tells what is, never stops at what is broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from localllm.backends import registry
from localllm.backends.cpu import probe
from localllm.backends.llamacpp import report
from localllm.backends.llamacpp.devices import Device
from localllm.backends.llamacpp.report import NativeReport
from localllm.cli import checks
from localllm.cli.known_bad import KNOWN_BAD, faults_of, is_within
from tests.cli.conftest import Result
from tests.cli.test_ls import put

Cli = Callable[..., Result]
CPU = Device("CPU", "a processor", "cpu", 0, 0)
GOOD = NativeReport("1.0", "CPU : AVX2 = 1 | ", ("AVX2",), (CPU,))
ORDINARY = probe.CpuFacts("a processor", "x86_64", frozenset({"avx2"}), 8, 6, 4, None)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test the same ordinary machine."""
    monkeypatch.setattr(registry, "native_report", lambda: GOOD)
    monkeypatch.setattr(probe, "probe", lambda: ORDINARY)


def rows(result: Result) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in result.json()["findings"]}


def test_sound_installation_ends_with_0(cli: Cli) -> None:
    result = cli("doctor")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("\nnothing is wrong\n")
    for section, _ in checks.EXAMINATIONS:
        assert f"\n{section}\n" in f"\n{result.out}"


def test_threads_and_engine_come_with_their_reason(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    told = rows(cli("doctor", "--json"))
    assert told["threads"]["value"] == "4: the least of 6 usable, 4 physical"
    assert "reports no GPU" in told["engine"]["value"]
    monkeypatch.setattr(probe, "probe", lambda: replace(ORDINARY, quota_cores=2.5))
    gpu = Device("CUDA0", "a GPU", "gpu", 10**9, 2 * 10**9)
    monkeypatch.setattr(registry, "native_report", lambda: replace(GOOD, devices=(CPU, gpu), supports_gpu=True))
    told = rows(cli("doctor", "--json"))
    assert told["threads"]["value"] == "2: the least of 6 usable, 4 physical, quota 2.5"
    assert told["CUDA0"]["value"] == "gpu: a GPU, 1.0 GB of 2.0 GB free"
    assert told["engine"]["value"].startswith("llama.cpp on CUDA0")


def test_what_is_set_is_what_would_be_used(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("CUDA0", "a GPU", "gpu", 10**9, 2 * 10**9)
    monkeypatch.setattr(registry, "native_report", lambda: replace(GOOD, devices=(CPU, gpu), supports_gpu=True))
    path = tmp_path / "config.toml"
    path.write_text('threads = 2\ngpu = "off"\n')
    monkeypatch.setenv("LOCALLLM_CONFIG", str(path))
    told = rows(cli("doctor", "--json"))
    assert (
        told["threads"]["value"] == f"--threads 2, as threads in {path} says; else 4: the least of 6 usable, 4 physical"
    )
    assert told["engine"]["value"].startswith(f"--gpu off, as gpu in {path} says; else llama.cpp on CUDA0")
    monkeypatch.setenv("LOCALLLM_THREADS", "1")
    assert rows(cli("doctor", "--json"))["threads"]["value"].startswith(
        "--threads 1, as LOCALLLM_THREADS says; else 4: "
    )
    monkeypatch.setenv("LOCALLLM_THREADS", "auto")
    assert rows(cli("doctor", "--json"))["threads"]["value"].startswith("4: ")
    monkeypatch.setenv("LOCALLLM_THREADS", "many")
    told = rows(cli("doctor", "--json"))["threads"]
    assert (told["state"], told["advice"]) == ("wrong", "unset LOCALLLM_THREADS")
    assert (told["state"], told["value"]) == ("wrong", "LOCALLLM_THREADS takes a number from 1 or auto, not 'many'.")


def test_library_for_another_cpu_is_told_with_the_way_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "native_report", lambda: replace(GOOD, features=("AVX2", "AVX512", "REPACK")))
    result = cli("doctor", "--json")
    row = rows(result)["fits this CPU"]
    assert result.code == 1
    assert result.json()["ok"] is False
    assert (row["state"], row["value"]) == ("wrong", "no: it uses AVX512, which this CPU lacks")
    assert "--no-binary llama-cpp-python" in row["advice"]


def test_library_that_dies_is_reported_not_followed(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    monkeypatch.setattr(registry, "native_report", report.native_report)
    result = cli("doctor", "--json")
    told = rows(result)
    assert result.code == 1
    assert "SIGILL" in told["loads"]["value"]
    assert told["engine"]["state"] == "wrong"
    assert told["store"]["state"] == "ok"


def test_examination_that_fails_is_a_line_and_the_others_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> probe.CpuFacts:
        raise OSError("no /proc here")

    monkeypatch.setattr(probe, "probe", broken)
    result = cli("doctor")
    assert result.code == 0
    assert "OSError: no /proc here" in result.out
    assert "default model" not in result.out
    assert "  store" in result.out


def test_known_bad_version_is_told_with_its_number_and_the_way_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.4" if name == "jinja2" else real(name))
    result = cli("doctor")
    assert result.code == 1
    assert "3.1.4: CVE-2024-56326" in result.out
    assert "CVE-2025-27516" in result.out
    assert "pip install 'jinja2>=3.1.6'" in result.out


def test_version_outside_the_tested_range_is_a_note(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9" if name == "llama-cpp-python" else real(name))
    row = rows(cli("doctor", "--json"))["llama-cpp-python"]
    assert row["state"] == "note"
    assert "was tested with" in row["value"]


def test_gpu_that_this_build_cannot_use_is_told_with_the_switch(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_unused_gpu", lambda: ("an NVIDIA GPU", "-DGGML_CUDA=on"))
    row = rows(cli("doctor", "--json"))["GPU"]
    assert "for the CPU only" in row["value"]
    assert "CMAKE_ARGS=-DGGML_CUDA=on pip install" in row["advice"]


def test_store_caches_and_damaged_models_are_told(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("org/alpha")
    next(put("org/cut").glob("*.gguf")).unlink()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    told = rows(cli("doctor", "--json"))
    assert "2 models" in told["store"]["value"]
    assert told["org/cut"]["state"] == "note"
    assert told["Hugging Face"]["value"] == f"{tmp_path}: 0 models"


def test_bad_settings_file_is_a_finding_not_the_end(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("ctx = ")
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "config.toml"))
    result = cli("doctor", "--json")
    assert result.code == 1
    assert "is not TOML" in rows(result)["file"]["value"]


def test_variables_are_named_without_their_values(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_SYSTEM", "a secret")
    out = cli("doctor").out
    assert "LOCALLLM_SYSTEM" in out
    assert "a secret" not in out


def test_real_library_answers_in_a_process_of_its_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "native_report", report.native_report)
    told = rows(cli("doctor", "--json"))
    assert told["compiled for"]["value"].startswith("CPU : ")
    assert told["CPU"]["section"] == "devices"


@pytest.mark.parametrize(
    ("name", "version", "n_faults"),
    [
        ("jinja2", "3.1.4", 2),
        ("Jinja2", "3.1.5", 1),
        ("jinja2", "3.1.6", 0),
        ("llama_cpp_python", "0.2.71", 4),
        ("llama-cpp-python", "0.3.16", 2),
        ("llama-cpp-python", "0.3.17", 0),
        ("llama-cpp-python", "0.3.36.post1", 0),
        ("numpy", "1.0", 0),
    ],
)
def test_faults_of_a_version(name: str, version: str, n_faults: int) -> None:
    assert len(faults_of(name, version)) == n_faults


def test_what_is_installed_here_has_no_known_fault() -> None:
    assert [bad for bad in KNOWN_BAD if faults_of(bad.distribution, metadata.version(bad.distribution))] == []


@pytest.mark.parametrize(
    ("version", "within"), [("0.3.35", False), ("0.3.36", True), ("0.3.36.post2", True), ("0.3.37", False)]
)
def test_bounds(version: str, within: bool) -> None:
    assert is_within(version, ">=0.3.36,<0.3.37") is within
