"""How much a measure changed from one cell to another, how sure that is, and when it counts as a change.

What the interval means. The statistic's spread is found by drawing blocks anew (`blocks.py`): whole
rounds where a file has them, else stretches of consecutive requests. The interval is the change plus
and minus that spread times Student's t with as many degrees of freedom as there were blocks. Rounds
that were measured apart carry the machine's drift from round to round, so their interval speaks of
the candidates. One run carries no trace of how the next would differ: RUN_SPREAD is added for it, a
convention, and the interval still speaks of these two runs alone.
Where both files asked the same requests in the same order, each block is drawn in both at once: what
a long prompt costs falls on both sides and drops out. The change of a median is then the median of the
requests' own changes, not the change between the two medians, each of which hangs on one or two requests.
Failed requests count by themselves: a burst of failures is no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.bench.compare.cell import PERCENTILES, Cell, Requests
from localllm.bench.measures import Kind, Measure
from localllm.bench.stats import blocks, student, summaries
from localllm.bench.stats.blocks import Block, Values
from localllm.bench.stats.ranks import mann_whitney

RUN_SPREAD = 0.01
"""Standard deviation, as a share, by which one run of the same is taken to differ from the next."""

SEED = 1
_APART = ("error",)
_MOST_APART = 1_000
_MOST_DEGREES = 1e6


@dataclass(frozen=True, slots=True)
class Change:
    """A measure in two cells. `a` and `b` in its own unit, of `n_a` and `n_b` samples in `n_blocks` (the fewer).

    `change`, `low` and `high`: as a share of `a` (0.1 = a tenth more) where `is_relative`, else in the
    measure's unit. `low`, `high` and `p` are None where each side is a single value. `p`: that so much
    would be seen if nothing had changed. `p_ranks`: Mann-Whitney's for the requests, of medians only.
    `is_gated`: both `p` and `p_ranks` must show a change.
    """

    measure: Measure
    a: float
    b: float
    change: float
    is_relative: bool
    n_a: int = 1
    n_b: int = 1
    n_blocks: int = 1
    is_paired: bool = False
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_ranks: float | None = None
    is_gated: bool = False

    @property
    def relative(self) -> float:
        """The change as a share of `a`; infinite from nothing to something."""
        if self.is_relative:
            return self.change
        return self.change / abs(self.a) if self.a else math.copysign(math.inf, self.change) if self.change else 0.0


@dataclass(frozen=True, slots=True)
class _Side:
    """One cell's samples of a measure: all of them, in blocks, and whether they are of one run."""

    requests: Requests
    rounds: tuple[Requests, ...]
    value: float
    is_apart: bool = False  # each request counts by itself

    @property
    def is_one_run(self) -> bool:
        return len(self.rounds) == 1

    def blocks(self) -> list[Block]:
        if self.is_one_run:
            n = min(len(self.requests), _MOST_APART) if self.is_apart else blocks.n_blocks(self.requests)
            return blocks.cut(self.requests, n)
        return [blocks.whole(requests) for requests in self.rounds]

    @property
    def medians(self) -> list[float]:
        return [blocks.middle(values) for values in self.requests if values]


def changed(of: Measure, a: Cell, b: Cell) -> Change | None:
    """Return how `of` changed from `a` to `b`; None where one of them has no such number."""
    percent = PERCENTILES.get(of.statistic)
    sides = _side(of, a, percent), _side(of, b, percent)
    if sides[0] is None or sides[1] is None or (of.statistic in ("min", "max")):
        return _of_values(of, a, b)
    return _of_samples(of, sides[0], sides[1], percent, may_pair=bool(of.statistic) and _same_requests(a, b))


def _side(of: Measure, cell: Cell, percent: float | None) -> _Side | None:
    """Return a cell's samples; rounds' own values where there are several, which no request can tell."""
    told = cell.values.get(of.name, ())
    if not of.statistic and len(told) > 1:
        alone: tuple[Requests, ...] = tuple(((value,),) for value in told)
        return _Side(tuple(request for each in alone for request in each), alone, summaries.mean(told))
    rounds = tuple(each for each in cell.samples.get(of.base, ()) if any(each))
    if not rounds:
        return None
    requests = tuple(request for each in rounds for request in each)
    if not of.statistic and told:
        return _Side(requests, rounds, told[0], is_apart=of.base in _APART)
    values = [value for request in requests for value in request]
    return _Side(requests, rounds, summaries.mean(values) if percent is None else summaries.percentile(values, percent))


def _same_requests(a: Cell, b: Cell) -> bool:
    """Say whether both asked prompts of the same lengths in the same order; a length of 0 is not known."""
    if not a.input_lens or len(a.input_lens) != len(b.input_lens):
        return False
    known = [(old, new) for old, new in zip(a.input_lens, b.input_lens, strict=True) if old and new]
    return bool(known) and all(old == new for old, new in known)


def _of_values(of: Measure, a: Cell, b: Cell) -> Change | None:
    told = a.values.get(of.name, ()), b.values.get(of.name, ())
    if not told[0] or not told[1]:
        return None
    first, second = summaries.mean(told[0]), summaries.mean(told[1])
    is_relative = of.kind is not Kind.SHARE and first > 0
    return Change(of, first, second, second / first - 1 if is_relative else second - first, is_relative)


def _of_samples(of: Measure, a: _Side, b: _Side, percent: float | None, *, may_pair: bool) -> Change:
    is_paired = may_pair and a.is_one_run and b.is_one_run and len(a.requests) == len(b.requests)
    if is_paired and of.statistic == "p50" and (ratios := _ratios(a, b)) is not None:
        return _of_ratios(of, a, b, ratios)
    of_a, of_b = _paired_blocks(a, b) if is_paired else (a.blocks(), b.blocks())
    n_blocks = min(len(of_a), len(of_b))
    # One seed for both: each side's spread is its own, and the files swapped give the same, mirrored.
    found = (
        blocks.resampled(of_a, percent, blocks.draws(len(of_a), SEED)),
        blocks.resampled(of_b, percent, blocks.draws(len(of_b), SEED)),
    )
    is_relative = of.kind is not Kind.SHARE and a.value > 0 and b.value > 0 and all(_is_positive(x) for x in found)
    is_median = of.statistic == "p50"
    base = Change(
        of,
        a.value,
        b.value,
        b.value / a.value - 1 if is_relative else b.value - a.value,
        is_relative,
        n_a=sum(map(len, a.requests)),
        n_b=sum(map(len, b.requests)),
        n_blocks=n_blocks,
        is_paired=is_paired,
        p_ranks=mann_whitney(a.medians, b.medians).p if is_median else None,
        is_gated=is_median and not is_paired and a.is_one_run and b.is_one_run,
    )
    return _with_interval(base, found, (len(of_a), len(of_b)), sum(side.is_one_run for side in (a, b)))


def _of_ratios(of: Measure, a: _Side, b: _Side, ratios: Requests) -> Change:
    """Return the median of what changed for each request."""
    cut = blocks.cut(ratios, blocks.n_blocks(ratios))
    found = blocks.resampled(cut, PERCENTILES["p50"], blocks.draws(len(cut), SEED))
    change = summaries.median([ratio for values in ratios for ratio in values]) - 1
    p_ranks = mann_whitney(a.medians, b.medians).p
    n_a, n_b = (sum(map(len, side.requests)) for side in (a, b))
    base = Change(of, a.value, b.value, change, True, n_a, n_b, len(cut), True, p_ranks=p_ranks)
    return _with_interval(base, (np.ones_like(found), found), (len(cut), len(cut)), 2)


def _ratios(a: _Side, b: _Side) -> Requests | None:
    """Return for each request how often its value in `a` goes into that in `b`; None where there are no ratios."""
    pairs = list(zip(a.requests, b.requests, strict=True))
    if any(value <= 0 for pair in pairs for values in pair for value in values):
        return None
    ratios = tuple((blocks.middle(new) / blocks.middle(old),) if old and new else () for old, new in pairs)
    return ratios if any(ratios) else None


def _paired_blocks(a: _Side, b: _Side) -> tuple[list[Block], list[Block]]:
    """Return both sides cut at the same requests, by how alike neighbours are in what changed."""
    n = blocks.n_blocks(_ratios(a, b) or a.requests)
    return blocks.cut(a.requests, n), blocks.cut(b.requests, n)


def _with_interval(base: Change, found: tuple[Values, Values], n_blocks: tuple[int, int], n_single_runs: int) -> Change:
    """Return `base` with the interval of its change and p; as it is where a side is one block."""
    if min(n_blocks) < 2:
        return base
    of_a, of_b = (np.log(side) if base.is_relative else side for side in found)
    if base.is_paired:
        spreads = [_variance(of_b - of_a, n_blocks[0])]
        dfs = [n_blocks[0] - 1]
    else:
        spreads = [_variance(side, n) for side, n in zip((of_a, of_b), n_blocks, strict=True)]
        dfs = [n - 1 for n in n_blocks]
    if any(math.isnan(spread) for spread in spreads):
        return base
    assumed = n_single_runs * RUN_SPREAD**2 if base.is_relative else 0.0
    change = math.log1p(base.change) if base.is_relative else base.change
    low, high, p = _student(change, sum(spreads) + assumed, _degrees(spreads, dfs, assumed))
    if base.is_relative:
        low, high = math.expm1(min(low, 700.0)), math.expm1(min(high, 700.0))
    return replace(base, low=low, high=high, p=p)


def _variance(drawn: Values, n_blocks: int) -> float:
    """Return the variance of a statistic over draws, made good for being taken from so few blocks."""
    known = drawn[np.isfinite(drawn)]
    return float(known.var()) * n_blocks / (n_blocks - 1) if len(known) > len(drawn) / 2 else math.nan


def _degrees(spreads: Sequence[float], dfs: Sequence[int], assumed: float) -> float:
    """Return the degrees of freedom of a sum of variances (Welch and Satterthwaite); what is assumed adds certainty."""
    uncertain = sum(spread**2 / df for spread, df in zip(spreads, dfs, strict=True))
    return min(_MOST_DEGREES, (sum(spreads) + assumed) ** 2 / uncertain) if uncertain > 0 else _MOST_DEGREES


def _student(change: float, variance: float, df: float) -> tuple[float, float, float]:
    """Return the interval of `change` and the p of it being none."""
    if variance <= 0:
        return change, change, 0.0 if change else 1.0
    spread = math.sqrt(variance)
    reach = student.quantile(summaries.LEVEL, df) * spread
    return change - reach, change + reach, student.two_sided_p(change / spread, df)


def _is_positive(values: Values) -> bool:
    known = values[np.isfinite(values)]
    return bool(len(known)) and bool((known > 0).all())
