"""How long the parts of a workload are: log-normal, clipped."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from math import exp
from statistics import NormalDist
from typing import Any

from localllm.bench.workloads.draws import BELL_ONE, Draws

_CLIP = 4  # at most so many times the median, at least the median over it
_N_QUANTILES = 400


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: its logarithm is normal around the median's, `sigma` wide.

    Clipped to a quarter and four times the median; a median of 0 is always 0.
    """

    median: int
    sigma: float
    unit: str = "words"

    @property
    def least(self) -> int:
        """The shortest there is."""
        return max(self.median // _CLIP, min(self.median, 1))

    @property
    def most(self) -> int:
        """The longest there is."""
        return self.median * _CLIP

    def draw(self, draws: Draws) -> int:
        """Return one length."""
        # Decimal's exp is exactly rounded everywhere; math.exp is not.
        context = Context(prec=20, rounding=ROUND_HALF_EVEN)
        power = context.multiply(Decimal(str(self.sigma)), context.divide(Decimal(draws.bell()), Decimal(BELL_ONE)))
        length = context.multiply(Decimal(self.median), context.exp(power))
        return min(max(int(length.to_integral_value(ROUND_HALF_EVEN)), self.least), self.most)

    @property
    def mean(self) -> float:
        """The expected length."""
        if not self.median or not self.sigma:
            return float(self.median)
        normal = NormalDist(0.0, self.sigma)
        drawn = (self.median * exp(normal.inv_cdf((at + 0.5) / _N_QUANTILES)) for at in range(_N_QUANTILES))
        return sum(min(max(length, self.least), self.most) for length in drawn) / _N_QUANTILES

    def facts(self) -> dict[str, Any]:
        """Return the distribution as a report writes it."""
        if not self.sigma:
            return {"unit": self.unit, "shape": "constant", "median": self.median}
        return {
            "unit": self.unit,
            "shape": "lognormal",
            "median": self.median,
            "sigma": self.sigma,
            "least": self.least,
            "most": self.most,
            "mean": round(self.mean, 1),
        }
