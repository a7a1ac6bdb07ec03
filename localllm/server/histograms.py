"""Histograms and the text form in which Prometheus reads them (exposition format 0.0.4)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

REQUEST_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For what a caller waits for: first token, whole request, queue, prefill, decode."""

TOKEN_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""For the time between two tokens."""

PART_BOUNDS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
"""For parts of a request that should be short: template, tokenise, match, restore, sample, IPC."""

Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Counts of observations by upper bound; `counts` has one entry more than `bounds`, for what is above all.

    Counts are kept apart for each bucket and added up only when rendered, so `+Inf` and `_count` cannot differ.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def n(self) -> int:
        """Observations so far."""
        return sum(self.counts)

    def observe(self, value: float, n: int = 1) -> None:
        """Count `value` `n` times. Negative values count as 0, infinite ones and NaN not at all."""
        if not math.isfinite(value):
            return
        value = max(value, 0.0)
        self.counts[bisect_left(self.bounds, value)] += n
        self.total += value * n

    def add(self, other: Histogram) -> None:
        """Count everything that `other` counted; both have the same bounds."""
        for index, n in enumerate(other.counts):
            self.counts[index] += n
        self.total += other.total


def head(name: str, kind: Kind, told: str) -> Iterator[str]:
    """Yield the two lines that introduce a family."""
    escaped = told.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {escaped}"
    yield f"# TYPE {name} {kind}"


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """Return one sample's line."""
    return f"{name}{_braced(labels)} {_number(value)}"


def samples_of(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    """Yield a histogram's lines: cumulative buckets, sum and count."""
    n_below = 0
    for bound, n in zip((*map(_number, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        n_below += n
        yield sample(f"{name}_bucket", {**labels, "le": bound}, n_below)
    yield sample(f"{name}_sum", labels, histogram.total)
    yield sample(f"{name}_count", labels, n_below)


def document(lines: Iterable[str]) -> str:
    """Return the lines as the text that is served."""
    return "".join(f"{line}\n" for line in lines)


def _braced(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return repr(round(value, 9))
