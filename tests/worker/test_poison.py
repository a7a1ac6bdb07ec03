"""The poison rule: who is suspected, who runs alone, who is refused, and for how long."""

from __future__ import annotations

import signal

from localllm.worker.poison import KEPT_S, NATIVE_DEATHS, PoisonLedger

A, B, C = b"a", b"b", b"c"
NONE: frozenset[bytes] = frozenset()


def test_one_death_changes_nothing() -> None:
    ledger = PoisonLedger()
    ledger.died_with([A, B], NONE, 0.0)
    assert ledger.to_run_alone(1.0) == []
    assert ledger.to_refuse(1.0) == []


def test_who_is_suspected_twice_runs_alone() -> None:
    ledger = PoisonLedger()
    ledger.died_with([A, B], NONE, 0.0)
    ledger.died_with([A, C], NONE, 1.0)
    assert ledger.to_run_alone(2.0) == [A]


def test_only_who_is_at_work_alone_when_the_worker_dies_is_refused() -> None:
    ledger = PoisonLedger()
    for now_s in (0.0, 1.0):
        ledger.died_with([A, B], NONE, now_s)
    assert ledger.to_run_alone(2.0) == [A, B]
    ledger.died_with([A], frozenset((A, B)), 2.0)
    assert ledger.to_refuse(3.0) == [A]
    assert ledger.to_run_alone(3.0) == [B]


def test_being_the_only_one_in_a_step_by_chance_is_not_running_alone() -> None:
    ledger = PoisonLedger()
    for now_s in range(5):
        ledger.died_with([A], NONE, float(now_s))
    assert ledger.to_refuse(5.0) == []
    assert ledger.to_run_alone(5.0) == [A]


def test_a_request_that_was_to_run_alone_but_had_company_is_not_refused() -> None:
    ledger = PoisonLedger()
    for now_s in range(3):
        ledger.died_with([A, B], frozenset((A,)), float(now_s))
    assert ledger.to_refuse(3.0) == []


def test_a_request_that_is_in_a_step_several_times_counts_once() -> None:
    ledger = PoisonLedger()
    ledger.died_with([A, A, A], NONE, 0.0)
    assert ledger.to_run_alone(1.0) == []


def test_all_is_forgotten_after_ten_minutes() -> None:
    ledger = PoisonLedger()
    for now_s in (0.0, 1.0):
        ledger.died_with([A], NONE, now_s)
    ledger.died_with([A], frozenset((A,)), 2.0)
    assert ledger.to_refuse(2.0 + KEPT_S) == [A]
    assert ledger.to_refuse(2.1 + KEPT_S) == []
    ledger.died_with([A], NONE, 3.0 + KEPT_S)
    assert ledger.to_run_alone(3.0 + KEPT_S) == []


def test_only_faults_of_native_code_count() -> None:
    assert {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS} == NATIVE_DEATHS
    assert signal.SIGKILL not in NATIVE_DEATHS
