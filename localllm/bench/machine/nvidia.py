"""What NVIDIA cards draw, and whether they slow down: readings of nvidia-smi, once a second while watched."""

from __future__ import annotations

import contextlib
import csv
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

# Drivers before 535 know the reasons by their older name only.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_EVERY_MS = 1000
_END_S = 2.0

SLOWED = 0x8 | 0x20 | 0x40 | 0x80
"""Reasons for lower clocks that spoil a run: hardware slowdown, heat (by software, by hardware), power brake.

Not the power cap: under load it is the ordinary state of many cards. Source: NVML's clocks event reasons.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """One card at one moment. `at_s` since 1970; None = not told."""

    card: int
    at_s: float
    watts: float | None
    reasons: int | None


class NvidiaWatch:
    """Reads the cards in the background. Does nothing where there is no nvidia-smi."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = shutil.which(program)
        self._lines: list[str] = []
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="localllm-nvidia", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        if self._program is not None:
            self._thread.start()

    def stop(self) -> list[Reading]:
        """End reading; return what was read. Idempotent."""
        with self._lock:
            self._ended = True
            child = self._child
        if child is not None:
            with contextlib.suppress(OSError):
                child.terminate()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        return list(readings(self._lines))

    def _read(self) -> None:
        for reasons in _REASONS:
            child = self._begin(reasons)
            if child is None:
                return
            assert child.stdout is not None
            with child, child.stdout:
                for line in child.stdout:
                    self._lines.append(line)
            if list(readings(self._lines)):
                return

    def _begin(self, reasons: str) -> subprocess.Popen[str] | None:
        query = f"--query-gpu=timestamp,index,power.draw,{reasons}"
        command = [str(self._program), query, "--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
        with self._lock, contextlib.suppress(OSError):
            if not self._ended:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                return self._child
        return None


def readings(lines: Iterable[str]) -> Iterable[Reading]:
    """Yield what the lines tell; what is no reading (a message, half a line) is left out."""
    for row in csv.reader(lines, skipinitialspace=True):
        with contextlib.suppress(ValueError):
            moment, card, watts, reasons = (field.strip() for field in row)
            at_s = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            yield Reading(int(card), at_s, _number(watts), int(reasons, 16) if reasons.startswith("0x") else None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def joules(found: Sequence[Reading], elapsed_s: float) -> dict[str, float]:
    """Return the energy of each card ("gpu0"): its mean power over the readings, for all of `elapsed_s`."""
    used: dict[str, float] = {}
    for card in sorted({reading.card for reading in found}):
        points = [(one.at_s, one.watts) for one in found if one.card == card and one.watts is not None]
        if points:
            used[f"gpu{card}"] = _mean(points) * elapsed_s
    return used


def _mean(points: Sequence[tuple[float, float]]) -> float:
    """Return the mean of values at points in time, a straight line between each two."""
    span_s = points[-1][0] - points[0][0]
    if span_s <= 0:
        return sum(value for _, value in points) / len(points)
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / span_s


def slowdowns(found: Sequence[Reading]) -> list[str]:
    """Return a sentence for each card that slowed down in more than one reading."""
    sentences = []
    for card in sorted({reading.card for reading in found}):
        told = [one.reasons for one in found if one.card == card and one.reasons is not None]
        n_slowed = sum(1 for reasons in told if reasons & SLOWED)
        if n_slowed > 1:
            sentences.append(f"gpu{card} slowed down for heat or power in {n_slowed} of {len(told)} readings")
    return sentences
