"""Draws are the same everywhere, and as likely as they say."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, pstdev

from localllm.bench.workloads.draws import BELL_ONE, Draws


def test_draws_are_pinned() -> None:
    draws = Draws(1, "chat", 0)
    assert [draws.below(1_000) for _ in range(6)] == PINNED
    assert [Draws("1", "chat", 0).below(1_000)] == PINNED[:1]


def test_draws_depend_on_every_part_of_the_key() -> None:
    keys = [(1, "chat", 0), (1, "chat", 1), (2, "chat", 0), (1, "rag", 0), (1, "chat"), (-1, "chat", 0)]
    assert len({tuple(Draws(*key).below(1 << 30) for _ in range(2)) for key in keys}) == len(keys)


def test_below_gives_every_number_equally_often() -> None:
    draws = Draws("even")
    counts = Counter(draws.below(10) for _ in range(20_000))
    assert set(counts) == set(range(10))
    # Six standard deviations of a binomial around 2000.
    assert all(abs(n - 2_000) < 260 for n in counts.values())


def test_between_gives_both_ends() -> None:
    draws = Draws("ends")
    assert {draws.between(3, 5) for _ in range(200)} == {3, 4, 5}
    assert draws.between(7, 7) == 7


def test_shuffled_keeps_all_and_leaves_its_argument_alone() -> None:
    items = tuple(range(40))
    found = Draws("order").shuffled(items)
    assert sorted(found) == list(items)
    assert found != list(items)


def test_bell_has_mean_zero_and_deviation_one() -> None:
    draws = Draws("bell")
    found = [draws.bell() / BELL_ONE for _ in range(20_000)]
    assert abs(fmean(found)) < 0.03
    assert abs(pstdev(found) - 1) < 0.03
    assert 0.66 < sum(abs(z) < 1 for z in found) / len(found) < 0.70


PINNED = [340, 362, 382, 248, 137, 889]
