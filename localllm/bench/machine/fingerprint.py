"""Describes the machine, the software and the model that a benchmark ran on, so that it can be repeated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm.models.info import ModelInfo

DISTRIBUTIONS = ("localllm", "llama-cpp-python", "numpy")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def begin(info: ModelInfo) -> dict[str, Any]:
    """Return what is known before anything is measured. Hashes the model, unless its hash is remembered."""
    return {"machine": machine(), "software": software(), "model": model(info), "load_average_before": load_average()}


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
    """Return the facts that stay while the machine is up: CPU, cores, memory, system."""
    from localllm.backends.cpu.probe import probe

    return {
        "cpu": _plain(asdict(probe())),
        "governor": governor(),
        "ram_bytes": ram_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "os_name": os_name(),
        "architecture": platform.machine(),
    }


def software() -> dict[str, Any]:
    """Return versions: Python, the distributions that matter, the native wheel's tags, our own commit."""
    versions = {name: _version(name) for name in DISTRIBUTIONS}
    return {
        "python": platform.python_version(),
        "executable_bits": 64 if sys.maxsize > 2**32 else 32,
        **versions,
        "wheel": wheel_tags("llama-cpp-python"),
        "git": git_state(Path(__file__).parents[2]),
    }


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


def wheel_tags(distribution: str) -> list[str]:
    """Return the tags of the wheel that a distribution was installed from; [] where it is not known."""
    try:
        text = metadata.distribution(distribution).read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return []
    return [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("Tag:")]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return our commit and whether files differ from it; None outside a checkout of the project."""
    if not (folder.parent / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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
    """Return the one line that tables are headed with, from a fingerprint."""
    return ", ".join(_line_parts(document))


def _line_parts(document: Mapping[str, Any]) -> Iterator[str]:
    found, made = document["machine"], document["software"]
    yield found["cpu"]["name"]
    yield f"{found['cpu']['n_usable']} of {found['cpu']['n_cores']} cores"
    yield f"{found['ram_bytes'] / 2**30:.1f} GiB"
    yield found["os_name"] or found["os"]
    yield f"llama-cpp-python {made['llama-cpp-python']}"
