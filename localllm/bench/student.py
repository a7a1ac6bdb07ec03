"""Student's t distribution, for intervals from few repetitions."""

from __future__ import annotations

import math

_TINY = 1e-300
_STEPS = 400


def two_sided_p(t: float, df: float) -> float:
    """Return the probability of a value at least as far from zero as `t` with `df` degrees of freedom."""
    if math.isinf(t):
        return 0.0
    return _beta_share(df / (df + t * t), df / 2, 0.5)


def quantile(level: float, df: float) -> float:
    """Return the `t` that |t| stays below with probability `level`: 2.776 for 0.95 and four degrees."""
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > 1 - level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, df) > 1 - level else (low, middle)
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b).

    Source: DLMF 8.17.22, the continued fraction, evaluated from the front as Lentz does.
    """
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front) / a
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
