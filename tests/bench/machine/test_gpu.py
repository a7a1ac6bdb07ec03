"""GPUs as nvidia-smi, the drivers' own files and macOS tell of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm.bench.machine.gpu import gpus
from localllm.bench.machine.tools import ask
from tests.bench.machine.trees import write


def nothing(command: Sequence[str]) -> str:
    return ""


def test_nvidia_cards_with_driver_and_memory(tmp_path: Path) -> None:
    answer = "NVIDIA GeForce RTX 3090, 550.54.14, 24576\nNVIDIA T1000, 550.54.14, [N/A]"
    found = gpus(tmp_path, "Linux", lambda command: answer)
    assert found == [
        {"vendor": "NVIDIA", "name": "NVIDIA GeForce RTX 3090", "driver": "550.54.14", "memory_bytes": 24576 << 20},
        {"vendor": "NVIDIA", "name": "NVIDIA T1000", "driver": "550.54.14", "memory_bytes": None},
    ]


@pytest.mark.parametrize("answer", ["No devices were found", "it failed because, it says, there is no driver", ""])
def test_a_message_of_nvidia_smi_is_no_card(tmp_path: Path, answer: str) -> None:
    assert gpus(tmp_path, "Linux", lambda command: answer) == []


def test_where_nvidia_smi_is_late_the_driver_tells_of_its_cards(tmp_path: Path) -> None:
    folder = "proc/driver/nvidia"
    for version in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build",
    ):
        write(
            tmp_path,
            {
                f"{folder}/version": version,
                f"{folder}/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   \t\t 104\nGPU UUID: GPU-1",
            },
        )
        assert gpus(tmp_path, "Linux", nothing) == [
            {"vendor": "NVIDIA", "name": "NVIDIA H200", "driver": "550.54.14", "memory_bytes": None}
        ]


def test_amd_cards_not_their_connectors_nor_other_vendors(tmp_path: Path) -> None:
    drm = "sys/class/drm"
    write(
        tmp_path,
        {
            f"{drm}/card0/device/vendor": "0x1002",
            f"{drm}/card0/device/device": "0x744c",
            f"{drm}/card0/device/mem_info_vram_total": str(16 << 30),
            f"{drm}/card0-DP-1/device/vendor": "0x1002",
            f"{drm}/card1/device/vendor": "0x8086",
            f"{drm}/card2/device/vendor": "0x1002",
            f"{drm}/card2/device/product_name": "Radeon PRO W7900",
        },
    )
    assert gpus(tmp_path, "Linux", nothing) == [
        {"vendor": "AMD", "name": "AMD 0x744c", "driver": None, "memory_bytes": 16 << 30},
        {"vendor": "AMD", "name": "Radeon PRO W7900", "driver": None, "memory_bytes": None},
    ]


def test_apple_chips_with_their_cores(tmp_path: Path) -> None:
    cards = [{"sppci_model": "Apple M2 Pro", "sppci_cores": "19", "spdisplays_vendor": "sppci_vendor_Apple"}]
    found = gpus(tmp_path, "Darwin", lambda command: json.dumps({"SPDisplaysDataType": cards}))
    assert found == [{"vendor": "Apple", "name": "Apple M2 Pro, 19 cores", "driver": None, "memory_bytes": None}]


@pytest.mark.parametrize("answer", ["", "{}", "[]", '{"SPDisplaysDataType": [{}]}', '{"SPDisplaysDataType": [3]}'])
def test_what_macos_does_not_tell_is_no_card(tmp_path: Path, answer: str) -> None:
    assert gpus(tmp_path, "Darwin", lambda command: answer) == []


def test_a_tool_that_fails_hangs_or_is_not_there_answers_nothing() -> None:
    assert ask(["/bin/sh", "-c", "echo this; exit 1"]) == ""
    assert ask(["/bin/sh", "-c", "sleep 5"], 0.05) == ""
    assert ask(["/nowhere/at-all"]) == ""
    assert ask(["/bin/sh", "-c", "printf 'two\\nlines\\n'"]) == "two\nlines"
