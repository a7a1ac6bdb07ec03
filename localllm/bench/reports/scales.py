"""Axes: where values lie on them, and round numbers to write beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM_RATIO = 40.0
"""Values that differ by more than this factor are shown on a logarithmic axis."""

LEAST = 1e-6
"""What is smaller is zero: no clock and no counter here tells it apart."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low`..`high` to `start`..`end` in pixels. `ticks` lie within."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the place of a value in pixels; what lies outside is at the edge."""
        kept = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(kept / self.low) / math.log(self.high / self.low)
        else:
            share = (kept - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def value_scale(values: Sequence[float], start: float, end: float, n_ticks: int = 5) -> Scale:
    """Return a scale for measured values: from zero, or logarithmic where they differ by much. Some value is there."""
    most, least = max(values), min(values)
    if least > LEAST and most / least > LOG_FROM_RATIO:
        ticks = log_ticks(least, most)
        return Scale(ticks[0], ticks[-1], start, end, True, ticks)
    ticks = linear_ticks(most if most > LEAST else 1.0, n_ticks)
    return Scale(0.0, ticks[-1], start, end, False, ticks)


def load_scale(loads: Sequence[float], start: float, end: float, least_gap: float) -> Scale:
    """Return a scale for loads, with ticks at the loads themselves, as far as they lie `least_gap` pixels apart."""
    low, high = min(loads), max(loads)
    high = high if high > low else low + 1.0
    bare = Scale(low, high, start, end, low > 0 and high / low >= 8, ())
    ticks: list[float] = []
    for load in sorted(set(loads)):
        if not ticks or bare.at(load) - bare.at(ticks[-1]) >= least_gap:
            ticks.append(load)
    return Scale(low, high, start, end, bare.is_log, tuple(ticks))


def linear_ticks(most: float, n_ticks: int) -> tuple[float, ...]:
    """Return round numbers from zero to the first that is not below `most` (above zero)."""
    step = _round_step(most / n_ticks)
    return tuple(_clean(step * i) for i in range(math.ceil(most / step - 1e-9) + 1))


def log_ticks(least: float, most: float) -> tuple[float, ...]:
    """Return 1, 2, 5 times powers of ten around `least`..`most`; powers alone where those are many."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    every = [_clean(factor * 10.0**power) for power in range(low, high + 1) for factor in factors]
    first = max((i for i, tick in enumerate(every) if tick <= least * (1 + 1e-9)), default=0)
    last = min((i for i, tick in enumerate(every) if tick >= most * (1 - 1e-9)), default=len(every) - 1)
    return tuple(every[first : last + 1])


def tick_text(value: float) -> str:
    """Return a round number as short as it is exact: "0.5", "250", "12k" from ten thousand on."""
    return f"{value / 1e3:g}k" if abs(value) >= 10_000 else f"{value:g}"


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def _clean(value: float) -> float:
    return float(f"{value:.10g}")
