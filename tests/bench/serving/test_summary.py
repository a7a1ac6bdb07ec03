from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from localllm.bench.client.calls import End
from localllm.bench.machine.resources import Resources
from localllm.bench.measures import LATENCIES, SCALARS, STATISTICS
from localllm.bench.serving.result import RunResult, Sample
from localllm.bench.serving.spec import Load, RunSpec
from localllm.bench.serving.summary import RunSummary, is_good, max_concurrent, max_tokens_in_a_second, summarise_run
from localllm.bench.slo import parse_slo
from localllm.errors import UsageError
from tests.bench.client.made_up import MadeUpWorkload, measured, outcome, result, sample

FAILED = (End.REFUSED, End.ERROR_EVENT, End.LOST, End.MALFORMED, End.TIMED_OUT, End.UNREACHABLE)
NAMES = [f"{base}_{statistic}" for base in LATENCIES for statistic in STATISTICS] + list(SCALARS)


def with_slo(text: str, *samples: Sample, **fields: Any) -> RunResult:
    spec = RunSpec(MadeUpWorkload(), Load(concurrency=1), slo=parse_slo(text))
    return result(*samples, spec=spec, **fields)


def expected_latencies(samples: list[Sample]) -> dict[str, list[float]]:
    """Work out every latency anew, in seconds and by arrays, from the outcomes alone."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for each in samples:
        of, times = each.outcome, np.array(each.outcome.token_s)
        found["ttft"].append((times.min() - of.due_s) * 1000)
        found["answer_ttft"].append(((of.answer_s or math.nan) - of.due_s) * 1000)
        found["e2e"].append((of.ended_s - of.due_s) * 1000)
        found["itl"] += list(np.diff(np.unique(times)) * 1000)
        if each.output_tokens > 1:
            found["tpot"].append(np.ptp(times) * 1000 / (each.output_tokens - 1))
        found["queue"].append((of.timings or {})["queue_ms"])
    return found


def test_every_latency_is_what_scipy_and_numpy_find() -> None:
    samples = measured(7, 80)
    found = summarise_run(result(*samples))
    for base, values in expected_latencies(samples).items():
        assert found.latencies[base].n == len(values)
        assert found.value(f"{base}_mean") == pytest.approx(stats.describe(values).mean)
        assert found.value(f"{base}_min") == pytest.approx(np.min(values))
        assert found.value(f"{base}_max") == pytest.approx(np.max(values))
        for percent in (50, 90, 95, 99):
            truth = stats.scoreatpercentile(values, percent, interpolation_method="fraction")
            assert found.value(f"{base}_p{percent}") == pytest.approx(truth)


def test_every_name_of_a_measure_has_a_value_or_none_and_no_other_name_has() -> None:
    found = summarise_run(result(*measured(1, 5)))
    for name in NAMES:
        value = found.value(name)
        assert value is None or math.isfinite(value)
    with pytest.raises(UsageError, match="ttft_p75"):
        found.value("ttft_p75")


def test_throughput_counts_from_the_first_request_due_to_the_last_end() -> None:
    samples = measured(3, 50)
    found = summarise_run(result(*samples, duration_s=1e6))
    span_s = max(s.outcome.ended_s for s in samples) - min(s.outcome.due_s for s in samples)
    n_out = sum(s.outcome.completion_tokens or 0 for s in samples)
    n_in = sum(s.outcome.prompt_tokens or 0 for s in samples)
    assert found.duration_s == pytest.approx(span_s)
    assert found.value("request_throughput") == pytest.approx(50 / span_s)
    assert found.value("output_throughput") == pytest.approx(n_out / span_s)
    assert found.value("total_token_throughput") == pytest.approx((n_in + n_out) / span_s)
    assert found.value("cached_share") == pytest.approx(sum(s.outcome.cached_tokens or 0 for s in samples) / n_in)


@pytest.mark.parametrize("end", FAILED)
def test_what_got_no_proper_answer_is_an_error_and_no_latency(end: End) -> None:
    good = sample(outcome(token_s=(10.5, 11.0), completion_tokens=2))
    bad = sample(outcome(end, token_s=(10.1, 10.2), ended_s=14.0, completion_tokens=9))
    found = summarise_run(result(good, bad, bad))
    assert found.value("error") == pytest.approx(2 / 3)
    assert found.latencies["ttft"].n == 1
    assert (found.duration_s, found.output_tokens) == (4.0, 2)


def test_what_our_stop_cancelled_is_not_counted_at_all() -> None:
    good = sample(outcome(token_s=(10.5, 11.0), completion_tokens=2))
    cut = sample(outcome(End.CANCELLED, due_s=0.0, token_s=(10.1,), ended_s=99.0))
    found = summarise_run(with_slo("error=0", good, cut))
    assert (found.n_requests, found.n_answers, found.n_cancelled) == (1, 1, 1)
    assert (found.duration_s, found.value("error"), found.value("goodput")) == (2.0, 0.0, 1.0)


def test_a_run_in_which_all_failed_has_rates_of_zero_and_no_latencies() -> None:
    found = summarise_run(with_slo("ttft_p95=1s", *[sample(outcome(end, status=500)) for end in FAILED]))
    assert (found.value("error"), found.value("goodput"), found.value("output_throughput")) == (1.0, 0.0, 0.0)
    assert (found.value("request_goodput"), found.latencies, found.n_answers) == (0.0, {}, 0)
    assert found.n_by_error == {"status 500": 2}
    assert all(found.value(f"{base}_p95") is None for base in LATENCIES)
    assert (found.max_output_tokens_per_s, found.max_concurrent_requests) == (0.0, 0)


def test_a_run_without_requests_has_no_figures() -> None:
    found = summarise_run(with_slo("ttft_p95=1s"))
    assert found.duration_s == 0.0
    assert {found.value(name) for name in NAMES} == {None}


def test_answers_of_one_token_have_no_pace_but_all_else() -> None:
    found = summarise_run(result(*[sample(outcome(token_s=(10.5,), completion_tokens=1)) for _ in range(3)]))
    assert found.value("ttft_p50") == pytest.approx(500)
    assert (found.value("tpot_p50"), found.value("itl_p50")) == (None, None)
    assert found.value("output_throughput") == pytest.approx(1.5)


def test_answers_without_usage_count_by_the_samples_and_tell_no_prompt() -> None:
    found = summarise_run(result(sample(outcome(token_s=(10.5, 11.5)), output_tokens=6), token_source="pieces"))
    assert found.value("tpot_p50") == pytest.approx(200)
    assert (found.prompt_tokens, found.value("total_token_throughput"), found.value("cached_share")) == (None,) * 3
    assert found.value("output_throughput") == pytest.approx(3)


def test_prompt_tokens_are_not_told_unless_every_answer_tells_them() -> None:
    told, silent = sample(outcome(prompt_tokens=8), 1), sample(outcome(), 1)
    assert summarise_run(result(told, told)).prompt_tokens == 16
    assert summarise_run(result(told, silent)).prompt_tokens is None


def test_an_answer_that_names_no_cached_tokens_had_none_where_others_do() -> None:
    some, none = sample(outcome(prompt_tokens=30, cached_tokens=20), 1), sample(outcome(prompt_tokens=10), 1)
    assert summarise_run(result(some, none)).value("cached_share") == pytest.approx(0.5)
    assert summarise_run(result(none, none)).value("cached_share") is None


def test_shares_of_drafts_and_valid_answers() -> None:
    drafted = sample(outcome(accepted_draft_tokens=6, rejected_draft_tokens=2), 1, is_valid=True)
    plain = sample(outcome(accepted_draft_tokens=0, rejected_draft_tokens=0), 1, is_valid=False)
    found = summarise_run(result(drafted, plain, sample(outcome(), 1)))
    assert (found.value("accepted_share"), found.value("valid_share")) == (0.75, 0.5)
    none = summarise_run(result(plain, sample(outcome(), 1)))
    assert (none.value("accepted_share"), none.value("valid_share")) == (None, 0.0)  # nothing was drafted


def test_what_was_more_than_allowed_is_counted() -> None:
    found = summarise_run(result(sample(outcome(), 65), sample(outcome(), 64), sample(outcome(End.LOST), 99)))
    assert found.n_over_limit == 1


def test_memory_and_energy_are_what_the_watch_found() -> None:
    resources = Resources(peak_memory_bytes=3_000_000_000, joules=50.0)
    found = summarise_run(result(sample(outcome(), 20), resources=resources, client_cpu_s=0.004))
    assert (found.value("peak_memory"), found.value("joules_per_token")) == (3e9, 2.5)
    assert found.client_cpu_ms_per_token == pytest.approx(0.2)
    assert summarise_run(result(sample(outcome(), 0), resources=resources)).value("joules_per_token") is None


def test_ready_is_told_by_whoever_started_the_server() -> None:
    assert summarise_run(result(ready_s=1.25)).value("ready") == pytest.approx(1250)
    assert summarise_run(result(ready_s=None)).value("ready") is None


def test_goodput_is_the_requests_within_every_bound() -> None:
    quick = sample(outcome(token_s=(10.1, 10.2, 10.3), completion_tokens=3))
    late = sample(outcome(token_s=(10.9, 11.0, 11.1), completion_tokens=3))
    slow = sample(outcome(token_s=(10.1, 10.8, 11.5), completion_tokens=3))
    found = summarise_run(with_slo("ttft_p95=500ms,tpot_p95=200ms", quick, late, slow, sample(outcome(End.LOST))))
    assert found.value("goodput") == 0.25
    assert found.value("request_goodput") == pytest.approx(0.5)
    assert summarise_run(result(quick)).value("goodput") is None  # nothing is asked


def test_a_bound_that_was_not_measured_is_not_kept_but_one_piece_keeps_every_pace() -> None:
    one = sample(outcome(token_s=(10.1,), completion_tokens=1))
    assert is_good(one, parse_slo("ttft_p95=500ms,tpot_p95=1ms,itl_p99=1ms"))
    assert not is_good(one, parse_slo("queue_p95=1s"))
    assert not is_good(sample(outcome(), 0), parse_slo("ttft_p95=10s"))  # an answer without a piece


def test_a_request_keeps_a_limit_on_gaps_at_the_limits_own_statistic() -> None:
    gaps_ms = [10.0] * 99 + [500.0]
    times = tuple(float(x) for x in 10.1 + np.cumsum([0.0, *gaps_ms]) / 1e3)
    stutters = sample(outcome(token_s=times, completion_tokens=101))
    assert is_good(stutters, parse_slo("itl_p90=20ms"))
    assert not is_good(stutters, parse_slo("itl_max=20ms"))
    assert not is_good(stutters, parse_slo("itl_p90=20ms,itl_max=20ms"))


def test_the_best_second_is_the_fullest_of_the_seconds_since_the_first_request_was_sent() -> None:
    samples = measured(11, 60, rate=9.0)
    begun_s = min(s.outcome.started_s for s in samples)
    buckets: dict[int, int] = {}
    for each in samples:
        for time_s in each.outcome.token_s:
            second = math.floor(time_s - begun_s)
            buckets[second] = buckets.get(second, 0) + 1
    assert max_tokens_in_a_second(samples) == pytest.approx(max(buckets.values()))


def test_a_piece_of_several_tokens_counts_as_several_in_the_best_second() -> None:
    assert max_tokens_in_a_second([sample(outcome(token_s=(10.3, 10.4), completion_tokens=10))]) == pytest.approx(10)


def test_requests_are_concurrent_from_when_they_are_sent_to_just_before_their_end() -> None:
    def under_way(begin_s: float, end_s: float) -> Any:
        return outcome(started_s=begin_s, ended_s=end_s)

    assert max_concurrent([under_way(0, 1), under_way(1, 2), under_way(2, 3)]) == 1
    assert max_concurrent([under_way(0, 2), under_way(1, 3), under_way(1.5, 1.6)]) == 3
    samples = [s.outcome for s in measured(5, 60, rate=9.0)]
    moments = [of.started_s for of in samples]
    truth = max(sum(of.started_s <= moment < of.ended_s for of in samples) for moment in moments)
    assert max_concurrent(samples) == truth


def test_a_summary_agrees_with_itself() -> None:
    found: RunSummary = summarise_run(with_slo("ttft_p95=80ms", *measured(2, 40), sample(outcome(End.LOST), 0)))
    assert found.n_requests == 41
    goodput, rate = found.value("goodput"), found.value("request_goodput")
    assert goodput is not None
    assert rate is not None
    assert goodput * 41 == pytest.approx(rate * found.duration_s)
