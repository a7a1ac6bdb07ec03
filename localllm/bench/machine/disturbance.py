"""Why a run should not be used: the machine swapped, throttled, or others took its cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.machine.counters import Counters

OTHERS_SHARE = 0.1
"""Of the cores that the run may use: above it others disturb."""

STOLEN_SHARE = 0.05
"""Of the time in which a core had work: above it the hypervisor disturbs."""

SWAPPED_BYTES = 4 << 20
"""A few idle pages of somebody are written out at any time."""

THROTTLED_SHARE = 0.01
"""Of the run, where the time is told: laptops throttle for a millisecond now and then."""

LEAST_S = 1.0
"""Runs that are shorter have no verdict on load: ticks are too coarse."""

_COUNTED_SHARES = 0.8, 1.2


@dataclass(frozen=True, slots=True)
class Span:
    """What lies between two readings of the counters.

    `ours_s`: CPU time of what is measured and of who measures; None where not all of it can be seen.
    `n_cores`: the usable ones; `quota_cores`: what a control group allows of them.
    """

    elapsed_s: float
    ours_s: float | None
    n_cores: int
    quota_cores: float | None = None

    @property
    def cores(self) -> float:
        """What the run may use."""
        return self.n_cores if self.quota_cores is None else min(self.n_cores, self.quota_cores)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`disturbances` in sentences; `unseen`: what could not be looked for here."""

    disturbances: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def verdict(before: Counters, after: Counters, span: Span) -> Verdict:
    """Return what disturbed between two readings of the counters."""
    found, unseen = list[str](), list[str]()
    for name, sentences in (
        ("load of others", _load(before, after, span)),
        ("stolen time", _stolen(before, after, span)),
        ("swapping", _swapped(before, after)),
        ("throttling", _throttled(before, after, span)),
    ):
        if sentences is None:
            unseen.append(name)
        else:
            found += sentences
    return Verdict(tuple(found), tuple(unseen))


def _load(before: Counters, after: Counters, span: Span) -> list[str] | None:
    """Return who else worked; None where nothing can be said."""
    busy_s, all_s = _passed(before.busy_s, after.busy_s), _passed(before.all_s, after.all_s)
    if busy_s is None or all_s is None or span.ours_s is None or span.elapsed_s < LEAST_S:
        return None
    least, most = (share * span.elapsed_s * span.n_cores for share in _COUNTED_SHARES)
    # Some containers show counters that are not of the cores that they run on.
    if not least <= all_s <= most or span.ours_s > busy_s + OTHERS_SHARE * span.elapsed_s * span.n_cores:
        return None
    others = max(0.0, busy_s - span.ours_s) / span.elapsed_s
    group_s = _passed(before.group_s, after.group_s)
    beside = max(0.0, group_s - span.ours_s) / span.elapsed_s if group_s is not None else 0.0
    return list(_others(others, beside, span))


def _others(others: float, beside: float, span: Span) -> Iterator[str]:
    """Yield what others left. `others`: cores that they kept busy; `beside`: those of them under our quota."""
    left, needed = span.n_cores - others, (1 - OTHERS_SHARE) * span.cores
    if left < needed:
        under = "" if span.quota_cores is None else f", which left less than the quota of {span.quota_cores:g}"
        yield f"others took {others:.1f} of {span.n_cores} cores on average{under}"
    elif span.quota_cores is not None and beside > OTHERS_SHARE * span.cores:
        yield f"others took {beside:.1f} of the {span.quota_cores:g} cores of the quota on average"


def _stolen(before: Counters, after: Counters, span: Span) -> list[str] | None:
    stolen_s, busy_s = _passed(before.stolen_s, after.stolen_s), _passed(before.busy_s, after.busy_s)
    if stolen_s is None or busy_s is None or span.elapsed_s < LEAST_S:
        return None
    share = stolen_s / max(stolen_s + busy_s, 1e-9)
    if share <= STOLEN_SHARE or stolen_s < 0.01 * span.elapsed_s:
        return []
    return [f"the hypervisor took {100 * share:.0f} % of the time in which there was work (stolen time)"]


def _swapped(before: Counters, after: Counters) -> list[str] | None:
    came_in = _passed(before.swapped_in_bytes, after.swapped_in_bytes)
    went_out = _passed(before.swapped_out_bytes, after.swapped_out_bytes)
    if came_in is None and went_out is None:
        return None
    if max(came_in or 0, went_out or 0) <= SWAPPED_BYTES:
        return []
    parts = [f"{(n or 0) / 1e6:.0f} MB {way}" for n, way in ((came_in, "in"), (went_out, "out")) if n is not None]
    return [f"the machine swapped: {', '.join(parts)}"]


def _throttled(before: Counters, after: Counters, span: Span) -> list[str] | None:
    if not after.throttles:
        return None
    count = _most(before.throttles, after.throttles)
    if count <= 0:
        return []
    if not after.throttled_ms:
        return [f"the processor throttled {count} times"]
    passed_s = _most(before.throttled_ms, after.throttled_ms) / 1e3
    if passed_s <= THROTTLED_SHARE * span.elapsed_s:
        return []
    return [f"the processor throttled {count} times, for {passed_s:.1f} of {span.elapsed_s:.1f} s"]


def _most(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return what the one that counted most has counted."""
    return max((value - before.get(name, value) for name, value in after.items()), default=0)


def _passed(before: float | None, after: float | None) -> float | None:
    """Return what was counted meanwhile; None where that is not told."""
    return None if before is None or after is None else after - before
