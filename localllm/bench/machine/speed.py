"""Whether the processor fell behind the clock that it began with, under load."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from pathlib import Path

from localllm.bench.machine.tools import Ask, ask
from localllm.models.system import read_number

KEPT_SHARE = 0.8
"""Of the clock under load at the beginning: below it the processor throttles."""

_N_READINGS = 4
"""Readings that are taken together: one alone says little."""

_MAC_QUERY = ("pmset", "-g", "therm")
_MAC_LIMIT = re.compile(r"CPU_Speed_Limit\s*=\s*(\d+)")


class ClockSpeed:
    """Follows the fastest core's clock while there is load. `root`: where sys is mounted."""

    def __init__(self, cores: Collection[int], root: Path = Path("/")) -> None:
        folders = [root / f"sys/devices/system/cpu/cpu{core}/cpufreq" for core in sorted(cores)]
        self._paths = [folder / "scaling_cur_freq" for folder in folders if (folder / "scaling_cur_freq").exists()]
        self._readings_khz: list[int] = []

    @property
    def is_readable(self) -> bool:
        """Whether the clock can be read here."""
        return bool(self._paths)

    def take(self) -> None:
        """Read the clock; call it under load only, for an idle core runs slowly on purpose."""
        found = [khz for khz in map(read_number, self._paths) if khz is not None]
        if found:
            self._readings_khz.append(max(found))

    def slowdown(self) -> str:
        """Return a sentence where the clock fell; "" where it did not, or nothing can be said."""
        readings = self._readings_khz
        if len(readings) < 2 * _N_READINGS:
            return ""
        groups = zip(*(readings[at:] for at in range(_N_READINGS)), strict=False)
        means = [sum(group) / _N_READINGS for group in groups]
        first, lowest = means[0], min(means)
        if lowest >= KEPT_SHARE * first:
            return ""
        share = round(100 * lowest / first)
        return f"the processor's clock fell from {first / 1e6:.2f} to {lowest / 1e6:.2f} GHz under load ({share} %)"


def mac_slowdown(query: Ask = ask, system: str = platform.system()) -> str | None:
    """Return macOS's own sentence on heat: "" where it does not slow down; None on other systems."""
    if system != "Darwin":
        return None
    answer = query(_MAC_QUERY)
    if not answer:
        return None
    limit = _MAC_LIMIT.search(answer)
    return f"macOS let the processor run at {limit[1]} % of its speed" if limit and int(limit[1]) < 100 else ""
