"""The fingerprint: what tells machines apart, what does not, and sentences for every difference."""

from __future__ import annotations

import copy
import getpass
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.machine import fingerprint
from localllm.bench.machine.fingerprint import changes, fingerprint_id
from localllm.models.info import read_info

DOCUMENT: dict[str, Any] = {
    "machine": {
        "cpu": {
            "name": "Some CPU",
            "architecture": "x86_64",
            "features": ["avx2", "f16c", "fma"],
            "n_cores": 8,
            "n_usable": 8,
            "n_physical": 4,
        },
        "quota_cores": None,
        "governor": "performance",
        "gpu": [{"vendor": "NVIDIA", "name": "RTX 9", "driver": "550.54", "memory_bytes": 24 << 30}],
        "power": "mains",
        "ram_bytes": 33_401_000_000,
        "os": "Linux 6.1.0",
        "os_name": "Debian 12",
        "architecture": "x86_64",
    },
    "software": {
        "python": "3.12.1",
        "executable_bits": 64,
        "localllm": "0.1.0",
        "llama-cpp-python": "0.3.36",
        "numpy": "2.1.0",
        "wheel": ["py3-none-linux_x86_64"],
        "git": {"commit": "abc123", "dirty": False},
        "llama.cpp": "0c1e570",
    },
    "load_average_before": [0.1, 0.1, 0.1],
}


def changed(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    edit(document)
    return document


MACHINE_CHANGES: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (lambda d: d["machine"]["cpu"].update(name="Other CPU"), ["CPU: Some CPU, now Other CPU"]),
    (
        lambda d: d["machine"]["cpu"].update(features=["avx512f", "f16c", "fma"]),
        ["CPU features: now without avx2 and with avx512f"],
    ),
    (lambda d: d["machine"]["cpu"].update(n_usable=4), ["usable cores: 8, now 4"]),
    (lambda d: d["machine"].update(quota_cores=2.5), ["CPU quota in cores: none, now 2.5"]),
    (lambda d: d["machine"].update(ram_bytes=66_000_000_000), ["memory: 31.1 GiB, now 61.5 GiB"]),
    (lambda d: d["machine"]["gpu"][0].update(driver="560.1"), ["NVIDIA driver: 550.54, now 560.1"]),
    (lambda d: d["machine"].update(gpu=[]), ["GPU: RTX 9, now none"]),
    (lambda d: d["machine"].update(os="Linux 6.8.0"), ["kernel: Linux 6.1.0, now Linux 6.8.0"]),
    (lambda d: d["machine"].update(os_name="Debian 13"), ["system: Debian 12, now Debian 13"]),
    (lambda d: d["machine"].update(architecture="aarch64"), ["architecture: x86_64, now aarch64"]),
    (lambda d: d["machine"].update(power="battery"), ["power: mains, now battery"]),
    (lambda d: d["machine"].update(power=None), ["power: mains, now not told"]),
]
SOFTWARE_CHANGES: list[tuple[Callable[[dict[str, Any]], object], list[str]]] = [
    (lambda d: d["software"].update({"llama-cpp-python": "0.3.37"}), ["llama-cpp-python: 0.3.36, now 0.3.37"]),
    (lambda d: d["software"].update(numpy=None), ["numpy: 2.1.0, now not installed"]),
    (lambda d: d["software"].update(python="3.13.0"), ["Python: 3.12.1, now 3.13.0"]),
    (
        lambda d: d["software"].update(wheel=["cp312-cp312-linux_x86_64"]),
        ["wheel of llama-cpp-python: py3-none-linux_x86_64, now cp312-cp312-linux_x86_64"],
    ),
    (
        lambda d: d["software"].update(git={"commit": "abc123", "dirty": True}),
        ["localllm's commit: abc123, now abc123 with changes"],
    ),
    (lambda d: d["software"].update(git=None), ["localllm's commit: abc123, now not told"]),
    (lambda d: d["software"].update({"llama.cpp": "1111111"}), ["llama.cpp's commit: 0c1e570, now 1111111"]),
]
NO_CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda d: d.update(load_average_before=[9.0, 9.0, 9.0]),
    lambda d: d["machine"]["cpu"].update(features=["fma", "f16c", "avx2"]),
    lambda d: d["software"].update({"llama.cpp": None}),  # was not asked
    lambda d: d["machine"].pop("gpu"),  # files of before GPUs were told
]


@pytest.mark.parametrize(("edit", "sentences"), MACHINE_CHANGES)
def test_another_machine_has_another_id_and_a_sentence(
    edit: Callable[[dict[str, Any]], object], sentences: list[str]
) -> None:
    other = changed(edit)
    assert fingerprint_id(other) != fingerprint_id(DOCUMENT)
    assert changes(DOCUMENT, other) == sentences


@pytest.mark.parametrize(("edit", "sentences"), SOFTWARE_CHANGES)
def test_other_software_is_told_and_leaves_the_machine_the_same(
    edit: Callable[[dict[str, Any]], object], sentences: list[str]
) -> None:
    other = changed(edit)
    assert fingerprint_id(other) == fingerprint_id(DOCUMENT)
    assert changes(DOCUMENT, other) == sentences


@pytest.mark.parametrize("edit", NO_CHANGES)
def test_what_is_not_told_or_does_not_last_is_no_change(edit: Callable[[dict[str, Any]], object]) -> None:
    assert changes(DOCUMENT, changed(edit)) == []
    assert changes(changed(edit), DOCUMENT) == []


def test_the_governor_is_told_but_does_not_make_another_machine() -> None:
    other = changed(lambda d: d["machine"].update(governor="powersave"))
    assert fingerprint_id(other) == fingerprint_id(DOCUMENT)
    assert changes(DOCUMENT, other) == ["governor: performance, now powersave"]


def test_a_boot_that_leaves_some_megabytes_less_is_the_same_machine() -> None:
    other = changed(lambda d: d["machine"].update(ram_bytes=33_401_000_000 - (30 << 20)))
    assert fingerprint_id(other) == fingerprint_id(DOCUMENT)


def test_the_machine_comes_before_the_software() -> None:
    other = changed(lambda d: (d["software"].update(python="4"), d["machine"].update(power=None)))
    assert changes(DOCUMENT, other) == ["power: mains, now not told", "Python: 3.12.1, now 4"]


def test_documents_that_tell_nothing_have_no_id_and_no_changes() -> None:
    assert fingerprint_id({}) == ""
    assert changes({}, DOCUMENT) == []


def test_this_machine_is_told_without_who_or_where(tiny: Path) -> None:
    found = fingerprint.begin(read_info(tiny / "llama-dense.gguf"))
    fingerprint.end(found)
    text = json.dumps(found)
    assert len(found["fingerprint_id"]) == 16
    assert found["fingerprint_id"] == fingerprint_id(found)
    assert found["machine"]["power"] in ("mains", "battery", None)
    assert "quota_cores" in found["machine"]
    names = [socket.gethostname(), getpass.getuser(), os.path.expanduser("~"), str(tiny), str(Path.cwd())]
    for name in names:
        assert len(name) < 4 or name not in text


def test_a_model_that_is_not_here_is_none_and_native_code_is_loaded_only_when_asked() -> None:
    found = fingerprint.begin(None)
    assert found["model"] is None
    assert found["software"]["llama.cpp"] is None
    asked = fingerprint.software(native=True)["llama.cpp"]
    assert asked
    assert len(asked) >= 7
