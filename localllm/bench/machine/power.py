"""Whether a machine runs on mains or on its battery."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Literal, TypeAlias

from localllm.models.system import read_text

PowerSource: TypeAlias = Literal["mains", "battery"]


def power_source(root: Path = Path("/"), system: str = platform.system()) -> PowerSource | None:
    """Return what feeds the machine; None where nothing tells (most desktops and servers).

    `root`: where sys is mounted.
    """
    if system == "Linux":
        return _supplies(root)
    import psutil

    battery = psutil.sensors_battery()
    return None if battery is None or battery.power_plugged is None else _named(battery.power_plugged)


def _supplies(root: Path) -> PowerSource | None:
    discharging: list[bool] = []
    for folder in sorted(root.glob("sys/class/power_supply/*")):
        kind = read_text(folder / "type")
        if kind == "Battery":
            status = read_text(folder / "status")
            if read_text(folder / "scope") != "Device" and status:  # a mouse has a battery too
                discharging.append(status == "Discharging")
        elif read_text(folder / "online") not in ("", "0"):  # mains, or a USB charger
            return "mains"
    return _named(not any(discharging)) if discharging else None


def _named(is_mains: bool) -> PowerSource:
    return "mains" if is_mains else "battery"
