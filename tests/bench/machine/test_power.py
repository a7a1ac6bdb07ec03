"""What feeds a machine, as /sys/class/power_supply tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.bench.machine.power import power_source
from tests.bench.machine.trees import write

ADAPTER_IN = {"AC/type": "Mains", "AC/online": "1"}
ADAPTER_OUT = {"AC/type": "Mains", "AC/online": "0"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (ADAPTER_IN, "mains"),
        ({**ADAPTER_IN, "BAT0/type": "Battery", "BAT0/status": "Charging"}, "mains"),
        ({**ADAPTER_OUT, "BAT0/type": "Battery", "BAT0/status": "Discharging"}, "battery"),
        ({"ucsi/type": "USB", "ucsi/online": "1", "BAT0/type": "Battery", "BAT0/status": "Not charging"}, "mains"),
        ({"BAT0/type": "Battery", "BAT0/status": "Full"}, "mains"),
        (
            {"BAT0/type": "Battery", "BAT0/status": "Full", "BAT1/type": "Battery", "BAT1/status": "Discharging"},
            "battery",
        ),
        ({"hid/type": "Battery", "hid/status": "Discharging", "hid/scope": "Device"}, None),  # a mouse
        (ADAPTER_OUT, None),
    ],
)
def test_power_source(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    write(tmp_path, {f"sys/class/power_supply/{name}": text for name, text in files.items()})
    assert power_source(tmp_path, "Linux") == expected
