"""The energy that the processor's own counters tell of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localllm.models.system import read_number, read_text


@dataclass(slots=True)
class _Zone:
    name: str
    path: Path
    range_uj: int
    last_uj: int
    used_uj: int = 0

    def take(self) -> bool:
        """Add what was used since the last time; return whether it could be read."""
        now_uj = read_number(self.path)
        if now_uj is None:
            return False
        # The counter begins again at 0 within an hour of full load.
        self.used_uj += now_uj - self.last_uj if now_uj >= self.last_uj else now_uj + self.range_uj - self.last_uj
        self.last_uj = now_uj
        return True


class Rapl:
    """The running average power limit's counters (Intel, AMD): processor packages and their DRAM.

    Most systems let only root read them. `root`: where sys is mounted.
    Source: Linux, Documentation/power/powercap/powercap.rst.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._zones: list[_Zone] = []
        for folder in sorted(root.glob("sys/class/powercap/intel-rapl:*")):
            name = _named(read_text(folder / "name"))
            now_uj, range_uj = read_number(folder / "energy_uj"), read_number(folder / "max_energy_range_uj")
            if name and now_uj is not None and range_uj is not None:
                self._zones.append(_Zone(name, folder / "energy_uj", range_uj, now_uj))

    def take(self) -> None:
        """Count what was used since the last time; at least every half hour, or a lap is lost."""
        self._zones = [zone for zone in self._zones if zone.take()]

    @property
    def joules(self) -> dict[str, float]:
        """The energy since the beginning, by what it was used in; {} where nothing can be read."""
        found: dict[str, float] = {}
        for zone in self._zones:
            found[zone.name] = found.get(zone.name, 0.0) + zone.used_uj / 1e6
        return found


def _named(zone: str) -> str:
    """Return what a zone counts; "" for those inside of another, or around all ("psys")."""
    return "cpu package" if zone.startswith("package") else "dram" if zone == "dram" else ""
