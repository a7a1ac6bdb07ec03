"""Describes the machine, the software and the model that a benchmark ran on, so that it can be repeated."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localllm.bench.machine.changes import gib, machine_changes, software_changes
from localllm.bench.machine.gpu import gpus
from localllm.bench.machine.power import power_source
from localllm.bench.machine.versions import git_state, llama_cpp_commit, version, wheel_tags
from localllm.models.info import ModelInfo

DISTRIBUTIONS = ("localllm", "llama-cpp-python", "numpy")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def begin(info: ModelInfo | None, *, native: bool = False) -> dict[str, Any]:
    """Return what is known before anything is measured. Hashes the model, unless its hash is remembered.

    `info` None: its files are not known here. `native`: see `software`.
    """
    found: dict[str, Any] = {"machine": machine(), "software": software(native=native)}
    found["fingerprint_id"] = fingerprint_id(found)
    return found | {"model": None if info is None else model(info), "load_average_before": load_average()}


def end(found: dict[str, Any]) -> None:
    """Add what is known only after."""
    found["load_average_after"] = load_average()


def model(info: ModelInfo) -> dict[str, Any]:
    """Return which bytes were measured: every file's hash, the quantisation, the size."""
    from localllm.models.hashes import sha256_of

    return {
        "name": info.name,
        "architecture": info.architecture,
        "quant": info.quant,
        "size_bytes": info.size_bytes,
        "n_params": info.n_params,
        "sha256": [sha256_of(path) for path in info.files],
    }


def machine() -> dict[str, Any]:
    """Return the facts that stay while the machine is up: CPU, cores, memory, GPUs, system, what feeds it."""
    from localllm.backends.cpu.probe import probe

    cpu = _plain(asdict(probe()))
    return {
        "cpu": cpu,
        "quota_cores": cpu.pop("quota_cores"),
        "governor": governor(),
        "gpu": gpus(),
        "power": power_source(),
        "ram_bytes": ram_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "os_name": os_name(),
        "architecture": platform.machine(),
    }


def software(*, native: bool = False) -> dict[str, Any]:
    """Return versions: Python, the distributions that matter, the native wheel's tags, our own commit.

    With `native`, llama.cpp's commit too: that loads the library. Raises NativeUnavailable then.
    """
    versions = {name: version(name) for name in DISTRIBUTIONS}
    return {
        "python": platform.python_version(),
        "executable_bits": 64 if sys.maxsize > 2**32 else 32,
        **versions,
        "wheel": wheel_tags("llama-cpp-python"),
        "git": git_state(Path(__file__).parents[2]),
        "llama.cpp": llama_cpp_commit() if native else None,
    }


def fingerprint_id(document: Mapping[str, Any]) -> str:
    """Return what tells machines apart: 16 hexadecimal digits over the part of a fingerprint that stays.

    Not in it: load, software, and what is different at every boot. "" where no machine is told of.
    """
    found = document.get("machine")
    if not found:
        return ""
    cpu = found.get("cpu") or {}
    lasting = {
        "cpu": [cpu.get("name"), sorted(cpu.get("features") or ()), cpu.get("n_usable")],
        "quota_cores": found.get("quota_cores", cpu.get("quota_cores")),
        "ram_gib": int((found.get("ram_bytes") or 0) // 2**30),  # some kilobytes come and go with the kernel
        "gpu": [[card.get("name"), card.get("driver")] for card in found.get("gpu") or ()],
        "os": [found.get("os_name"), found.get("os"), found.get("architecture")],
        "power": found.get("power"),
    }
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:16]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each way in which two fingerprints differ: the machine's first, then the software's."""
    return machine_changes(old, new) + software_changes(old, new)


def load_average() -> list[float] | None:
    """Return the number of runnable tasks over 1, 5 and 15 minutes; None where it is not told."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except OSError:
        return None


def governor(path: Path = GOVERNOR) -> str | None:
    """Return the first core's frequency governor; None where there is none (virtual machines, macOS)."""
    try:
        return path.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def ram_bytes() -> int:
    """Return the memory of the machine, whatever a control group allows of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def os_name() -> str:
    """Return the system's own name for itself ("Debian GNU/Linux 12 (bookworm)", "macOS 15.1")."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _plain(value: Any) -> Any:
    """Return `value` in what JSON has: sets in order, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def machine_line(document: Mapping[str, Any]) -> str:
    """Return the one line that tables are headed with, from a fingerprint: the machine, and the kernels we use."""
    return f"{machine_words(document)}, llama-cpp-python {document['software']['llama-cpp-python']}"


def machine_words(document: Mapping[str, Any]) -> str:
    """Return the machine of a fingerprint in a line, whatever runs there."""
    return ", ".join(_line_parts(document["machine"]))


def _line_parts(found: Mapping[str, Any]) -> Iterator[str]:
    yield found["cpu"]["name"]
    yield f"{found['cpu']['n_usable']} of {found['cpu']['n_cores']} cores"
    yield gib(found["ram_bytes"])
    yield found["os_name"] or found["os"]
