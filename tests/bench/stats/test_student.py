"""Student's t distribution against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from localllm.bench.stats import student


def test_p_and_quantile_are_scipys() -> None:
    t_of = pytest.importorskip("scipy.stats").t
    rng = np.random.default_rng(0)
    for _ in range(300):
        df, t, level = float(rng.uniform(1, 500)), float(rng.uniform(-12, 12)), float(rng.uniform(0.5, 0.999))
        assert student.two_sided_p(t, df) == pytest.approx(2 * t_of.sf(abs(t), df), rel=1e-9, abs=1e-14)
        assert student.quantile(level, df) == pytest.approx(t_of.ppf((1 + level) / 2, df), rel=1e-9)


def test_the_ends_are_known() -> None:
    assert student.two_sided_p(0.0, 5) == 1.0
    assert student.two_sided_p(math.inf, 5) == 0.0
    assert student.quantile(0.95, 1e6) == pytest.approx(1.959966, abs=1e-5)
