"""When requests come in an open loop: random moments at a mean rate, evenly spread or in bursts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from localllm.errors import UsageError

_AT_ONCE = 256


def arrival_offsets(rate_per_s: float, shape: float, seed: int) -> Iterator[float]:
    """Return seconds from the start, ascending, without end: the same for the same arguments.

    The times between them are gamma distributed with mean 1 / `rate_per_s` and coefficient of
    variation 1 / sqrt(`shape`): 1 = a Poisson process, below 1 bursts, above 1 evener.
    Raises: UsageError where the rate or the shape is not above zero.
    """
    for name, value in (("rate", rate_per_s), ("shape", shape)):
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"The {name} of arrivals is a number above zero, not {value:g}.", "--rate 2:gamma=0.5")
    return _sums(rate_per_s, shape, seed)


def _sums(rate_per_s: float, shape: float, seed: int) -> Iterator[float]:
    draws = np.random.default_rng(seed)
    now_s = 0.0
    while True:
        for between_s in draws.gamma(shape, 1 / (rate_per_s * shape), _AT_ONCE):
            now_s += float(between_s)
            yield now_s
