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
    t = 0.5 if two_sided_p(0.5, df) > 1 - level else 0.0
    for _ in range(_STEPS):  # Newton's steps from below never pass the root: the tail is convex
        step = (two_sided_p(t, df) - (1 - level)) / (2 * _density(t, df))
        t += step
        if step <= 1e-13 * t:
            break
    return t


def _density(t: float, df: float) -> float:
    log_height = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    return math.exp(log_height - (df + 1) / 2 * math.log1p(t * t / df))


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
