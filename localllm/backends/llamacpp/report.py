"""What the installed native library is, asked in a process of its own.

A library that was compiled for another CPU dies with SIGILL, possibly while it loads: `doctor`
must live to tell.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass

from localllm.backends.llamacpp.devices import Device

_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class NativeReport:
    """`features`: what the library was compiled for ("AVX2", ...). `failure`: "" or why it does not load."""

    version: str = ""
    system_info: str = ""
    features: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    repacking_is_safe: bool = True
    supports_gpu: bool = False
    failure: str = ""


def native_report() -> NativeReport:
    """Load the library in a child process and return what it says; a crash is a report too."""
    command = [sys.executable, "-m", "localllm.backends.llamacpp.report"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return NativeReport(failure=f"the native library gave no answer: {error}")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        cause = ": it was compiled for another CPU" if name == "SIGILL" else ""
        return NativeReport(failure=f"the native library died of {name} while it was loaded{cause}")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return NativeReport(failure=f"the native library cannot be loaded: {last}")
    devices = tuple(Device(**device) for device in said.pop("devices"))
    return NativeReport(**{**said, "features": tuple(said["features"]), "devices": devices})


def features_of(system_info: str) -> tuple[str, ...]:
    """Return the names that stand with "= 1" in llama.cpp's system line ("CPU : AVX2 = 1 | ...")."""
    parts = (part.rpartition(" : ")[2].partition("=") for part in system_info.split("|"))
    return tuple(name.strip() for name, _, value in parts if value.strip() == "1")


def _say() -> None:
    from localllm.backends.llamacpp import bindings
    from localllm.backends.llamacpp.devices import list_devices

    info = bindings.system_info()
    report = NativeReport(
        version=bindings.library_version(),
        system_info=info,
        features=features_of(info),
        devices=list_devices(),
        repacking_is_safe=bindings.repacking_is_safe(),
        supports_gpu=bool(bindings.load().api.llama_supports_gpu_offload()),
    )
    json.dump(asdict(report), sys.stdout)


if __name__ == "__main__":
    _say()
