"""Which runs are not to be used, and in which words: from counters before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localllm.bench.machine.counters import Counters
from localllm.bench.machine.disturbance import Span, Verdict, verdict

BEFORE = Counters(
    busy_s=100.0,
    stolen_s=5.0,
    all_s=1000.0,
    swapped_in_bytes=1 << 30,
    swapped_out_bytes=1 << 30,
    throttles={"cpu0 core": 900, "cpu1 core": 2},
    throttled_ms={"cpu0 core": 9000, "cpu1 core": 20},
)
SPAN = Span(elapsed_s=10.0, ours_s=12.0, n_cores=4)
MB = 1_000_000


def after(*, busy: float = 12.0, stolen: float = 0.0, **more: Any) -> Counters:
    """Return the counters ten seconds later on four cores, of which `busy` seconds were worked."""
    passed = replace(BEFORE, busy_s=100.0 + busy, stolen_s=5.0 + stolen, all_s=1000.0 + 40.0)
    return replace(passed, **more)


def found(later: Counters, span: Span = SPAN, before: Counters = BEFORE) -> tuple[str, ...]:
    return verdict(before, later, span).disturbances


def test_a_quiet_run_is_not_disturbed_and_everything_was_looked_at() -> None:
    assert verdict(BEFORE, after(), SPAN) == Verdict()
    assert found(after(busy=15.9)) == ()


def test_others_that_work_are_told_in_cores() -> None:
    assert found(after(busy=25.0)) == ("others took 1.3 of 4 cores on average",)


def test_a_run_under_a_second_has_no_verdict_on_load() -> None:
    short = Span(elapsed_s=0.9, ours_s=0.1, n_cores=4)
    later = replace(BEFORE, busy_s=103.6, all_s=1003.6)
    assert verdict(BEFORE, later, short) == Verdict((), ("load of others", "stolen time"))


def test_without_seeing_the_server_nobody_else_can_be_told_from_it() -> None:
    seen = verdict(BEFORE, after(busy=40.0), replace(SPAN, ours_s=None))
    assert seen == Verdict((), ("load of others",))


@pytest.mark.parametrize(
    "later",
    [
        after(busy_s=None),
        after(busy=2.0),  # fewer than we used ourselves
        after(all_s=1000.0 + 160.0),  # of a machine with more cores
        after(all_s=1000.0 + 4.0),
    ],
)
def test_counters_that_cannot_be_of_these_cores_give_no_verdict(later: Counters) -> None:
    seen = verdict(BEFORE, later, SPAN)
    assert seen.disturbances == ()
    assert "load of others" in seen.unseen


def test_under_a_quota_others_may_work_where_we_could_not() -> None:
    """2 of 4 cores are ours to use: others that keep 2 busy leave them; others that keep 3 busy do not."""
    span = replace(SPAN, quota_cores=2.0)
    assert found(after(busy=12.0 + 20.0), span) == ()
    assert found(after(busy=12.0 + 28.0), span) == (
        "others took 2.8 of 4 cores on average, which left less than the quota of 2",
    )


def test_under_a_quota_others_of_the_same_group_disturb() -> None:
    span, before = replace(SPAN, quota_cores=2.0), replace(BEFORE, group_s=50.0)
    assert found(after(busy=17.0, group_s=50.0 + 13.0), span, before) == ()
    assert found(after(busy=17.0, group_s=50.0 + 17.0), span, before) == (
        "others took 0.5 of the 2 cores of the quota on average",
    )


def test_a_quota_above_the_cores_is_none() -> None:
    assert found(after(busy=25.0), replace(SPAN, quota_cores=64.0)) == (
        "others took 1.3 of 4 cores on average, which left less than the quota of 64",
    )


def test_stolen_time_counts_where_there_was_work() -> None:
    assert found(after(stolen=0.5)) == ()
    assert found(after(stolen=1.0)) == ("the hypervisor took 8 % of the time in which there was work (stolen time)",)
    nearly_idle = replace(SPAN, ours_s=0.1)
    assert found(after(busy=0.1, stolen=0.05), nearly_idle) == ()


def test_swapping_is_told_and_a_few_pages_are_not() -> None:
    more = {"swapped_in_bytes": (1 << 30) + 12 * MB, "swapped_out_bytes": (1 << 30) + 40 * MB}
    assert found(after(**more)) == ("the machine swapped: 12 MB in, 40 MB out",)
    assert found(after(swapped_in_bytes=(1 << 30) + 3 * MB)) == ()
    assert found(after(swapped_in_bytes=None, swapped_out_bytes=(1 << 30) + 40 * MB)) == (
        "the machine swapped: 40 MB out",
    )
    assert verdict(BEFORE, after(swapped_in_bytes=None, swapped_out_bytes=None), SPAN).unseen == ("swapping",)


def test_throttling_counts_by_core_and_by_time_where_that_is_told() -> None:
    often, long = {"cpu0 core": 900, "cpu1 core": 52}, {"cpu0 core": 9000, "cpu1 core": 2520}
    assert found(after(throttles=often, throttled_ms=long)) == ("the processor throttled 50 times, for 2.5 of 10.0 s",)
    assert found(after(throttles=often, throttled_ms={"cpu0 core": 9000, "cpu1 core": 90})) == ()
    untimed = replace(BEFORE, throttled_ms={})
    assert found(after(throttles=often, throttled_ms={}), before=untimed) == ("the processor throttled 50 times",)
    assert verdict(BEFORE, after(throttles={}), SPAN).unseen == ("throttling",)
