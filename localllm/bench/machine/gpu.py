"""Which GPUs a machine has, with their drivers. No serial numbers, no addresses: nothing that names one card."""

from __future__ import annotations

import csv
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.bench.machine.tools import Ask, ask, ask_patiently
from localllm.models.system import read_number, read_text

NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits")
MAC_QUERY = ("system_profiler", "SPDisplaysDataType", "-json")
_MIB = 1 << 20
_AMD_VENDOR = "0x1002"
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_NVIDIA_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `vendor`: "NVIDIA", "AMD" or "Apple". None = not told here."""

    vendor: str
    name: str
    driver: str | None = None
    memory_bytes: int | None = None


def gpus(root: Path = Path("/"), system: str = platform.system(), query: Ask | None = None) -> list[dict[str, Any]]:
    """Return the cards of this machine, [] where none is found.

    `root`: where proc and sys are mounted. `query`: asks a tool of the system.
    """
    if system == "Darwin":
        found = list(mac_gpus((query or ask_patiently)(MAC_QUERY)))
    else:
        found = list(nvidia_gpus((query or ask)(NVIDIA_QUERY))) or list(_nvidia_in_proc(root))
        found += amd_gpus(root)
    return [asdict(gpu) for gpu in found]


def nvidia_gpus(answer: str) -> Iterator[Gpu]:
    """Yield what nvidia-smi told of each card."""
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        name, driver, mib = (*(field.strip() for field in row), "", "", "")[:3]
        if _VERSION.fullmatch(driver):  # anything else is a message
            yield Gpu("NVIDIA", name, driver, int(mib) * _MIB if mib.isdigit() else None)


def _nvidia_in_proc(root: Path) -> Iterator[Gpu]:
    """Yield what the driver itself tells, for a machine where nvidia-smi is late or not there."""
    folder = root / "proc/driver/nvidia"
    driver = _NVIDIA_DRIVER.search(read_text(folder / "version"))
    for path in sorted(folder.glob("gpus/*/information")):
        for line in read_text(path).splitlines():
            if line.startswith("Model:"):
                yield Gpu("NVIDIA", line.removeprefix("Model:").strip(), driver[1] if driver else None)


def amd_gpus(root: Path) -> Iterator[Gpu]:
    """Yield the cards that the amdgpu driver holds."""
    for device in sorted(root.glob("sys/class/drm/card[0-9]*/device")):
        if "-" in device.parent.name or read_text(device / "vendor") != _AMD_VENDOR:  # card0-DP-1 is a connector
            continue
        name = read_text(device / "product_name") or f"AMD {read_text(device / 'device') or 'GPU'}"
        driver = read_text(root / "sys/module/amdgpu/version") or None  # the kernel's own has no version
        yield Gpu("AMD", name, driver, read_number(device / "mem_info_vram_total"))


def mac_gpus(answer: str) -> Iterator[Gpu]:
    """Yield what macOS's system_profiler told; its driver is the system's version."""
    try:
        cards = json.loads(answer)["SPDisplaysDataType"]
        for card in cards:
            cores = card.get("sppci_cores")
            yield Gpu("Apple", card["sppci_model"] + (f", {cores} cores" if cores else ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return
