"""Several runs: every protocol at every load, sweeps, and what ends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localllm.bench.serving.result import RunResult
from localllm.bench.serving.series import Loads, knees, run_series
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.sweep import RATE_SHARES, Sweep
from tests.bench.client.made_up import MadeUpWorkload, outcome, result, sample

SPEC = RunSpec(MadeUpWorkload(), Load(concurrency=1))
BOTH = (Cache.COLD, Cache.WARM)


def answered(spec: RunSpec) -> RunResult:
    """Return a run of a server that does 8 answers a second at most, of 10 tokens each."""
    load = spec.load
    per_s = min(2.0 * (load.concurrency or 0) or load.rate_per_s or 0.0, 8.0)
    samples = [
        sample(
            outcome(
                due_s=n / (load.rate_per_s or per_s),
                ended_s=1.0 + n / per_s,
                token_s=(1.0 + n / per_s,),
                completion_tokens=10,
            )
        )
        for n in range(20)
    ]
    return result(*samples, spec=spec, duration_s=20 / per_s)


def series(loads: Loads, measure: Callable[[RunSpec], RunResult] = answered) -> list[RunResult]:
    kept: list[RunResult] = []
    run_series(measure, SPEC, BOTH, loads, kept.append)
    return kept


def order(results: list[RunResult]) -> list[tuple[str, str]]:
    return [(one.spec.cache.value, str(one.spec.load)) for one in results]


def test_every_protocol_at_every_load() -> None:
    loads = Loads((Load(concurrency=1), Load(concurrency=4)))
    assert order(series(loads)) == [
        ("cold", "concurrency 1"),
        ("cold", "concurrency 4"),
        ("warm", "concurrency 1"),
        ("warm", "concurrency 4"),
    ]


def test_a_sweep_of_clients_under_each_protocol() -> None:
    results = series(Loads(sweep=Sweep.CLIENTS))
    assert [one.spec.load.concurrency for one in results] == [1, 2, 4, 8] * 2
    assert [(one.cache, one.load.concurrency) for one in knees(results)] == [("cold", 4), ("warm", 4)]


def test_a_sweep_of_rates_tells_the_capacity_that_they_are_shares_of() -> None:
    results = series(Loads(sweep=Sweep.RATES, shape=0.5))
    assert [one.spec.load for one in results[:7]] == [
        Load(rate_per_s=round(8.0 * share, 2), shape=0.5) for share in RATE_SHARES
    ]
    assert "the rates are shares of what 8 clients got: 8 answers a second" in results[0].notes
    assert knees(results)[0].load.rate_per_s == 8.0


def test_a_partial_run_is_kept_and_is_the_last() -> None:
    def stopped(spec: RunSpec) -> RunResult:
        return replace(answered(spec), partial=spec.load.concurrency == 2)

    assert order(series(Loads(sweep=Sweep.CLIENTS), stopped)) == [("cold", "concurrency 1"), ("cold", "concurrency 2")]
    fixed = Loads((Load(concurrency=2), Load(concurrency=4)))
    assert order(series(fixed, stopped)) == [("cold", "concurrency 2")]


def test_what_is_not_supported_is_tried_once() -> None:
    def refused(spec: RunSpec) -> RunResult:
        return result(spec=spec, unsupported="no")

    for loads in (Loads((Load(concurrency=1), Load(concurrency=2))), Loads(sweep=Sweep.RATES)):
        assert len(series(loads, refused)) == 1


def test_one_load_has_no_knee() -> None:
    assert knees(series(Loads((Load(concurrency=1),)))) == []
