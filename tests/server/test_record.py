"""Events of a request become its numbers."""

from __future__ import annotations

import pytest

from localllm.runtime.events import Admitted, Done, Embedded, Error, Event, Finished, Progress, Queued, Token, Usage
from localllm.server.record import RequestRecord


def record_of(*batches: tuple[float, list[Event]]) -> RequestRecord:
    record = RequestRecord("r1", "/v1/chat/completions", model="m", started_s=100.0)
    for now_s, batch in batches:
        record.see(batch, now_s)
    return record


def test_first_token_and_gaps_are_measured_from_when_events_came() -> None:
    record = record_of(
        (100.1, [Queued("r1", 0)]),
        (100.2, [Admitted(7, {"device": 3}, 1, 10), Progress(7, 7)]),
        (100.5, [Token(0, "a", (1,))]),
        (100.6, [Token(0, "", (2,))]),
        (100.9, [Token(0, "bc", (3,)), Finished(0, "stop")]),
    )
    assert record.ttft_s == pytest.approx(0.5)
    assert record.admitted_s == 100.2
    assert record.itl.n == 2
    assert record.itl.total == pytest.approx(0.4)
    assert record.itl_max_s == pytest.approx(0.3)
    assert (record.n_prompt_tokens, dict(record.cached_tokens), record.n_completion_tokens) == (7, {"device": 3}, 3)


def test_tokens_that_come_together_share_the_gap() -> None:
    record = record_of(
        (101.0, [Token(0, "a", (1,))]),
        (101.44, [Token(0, "b", (2,)), Token(0, "c", (3, 4, 5))]),
    )
    assert record.itl.n == 4
    assert record.itl.total == pytest.approx(0.44)
    assert record.itl.counts[record.itl.bounds.index(0.15)] == 4


def test_tokens_that_come_with_the_first_one_have_no_gap() -> None:
    record = record_of((101.0, [Token(0, "abc", (1, 2, 3)), Token(1, "x", (1,))]))
    assert (record.itl.n, record.itl.total, record.n_completion_tokens) == (2, 0.0, 4)


def test_gaps_are_counted_for_each_choice_alone() -> None:
    record = record_of(
        (101.0, [Token(0, "a", (1,)), Token(1, "x", (1,))]),
        (101.2, [Token(1, "y", (2,))]),
        (101.3, [Token(0, "b", (2,))]),
    )
    assert record.itl.n == 2
    assert record.itl.total == pytest.approx(0.5)


def test_held_back_text_without_ids_is_no_token() -> None:
    record = record_of((101.0, [Token(0, "", (1,))]), (102.0, [Token(0, "rest", ()), Finished(0, "length")]))
    assert (record.itl.n, record.n_completion_tokens, record.finish_reason) == (0, 1, "length")


def test_usage_has_the_last_word_on_counts_and_phases() -> None:
    usage = Usage(9, 20, {"device": 4}, timings_ms={"queue": 12.5, "prefill": 100.0, "total": 400.0})
    record = record_of((101.0, [Token(0, "a", (1,))]), (102.0, [Finished(0, "stop"), usage, Done()]))
    record.ipc_ms = 3.0
    assert (record.n_prompt_tokens, record.n_completion_tokens, record.cached_tokens) == (9, 20, {"device": 4})
    assert record.queue_s == pytest.approx(0.0125)
    assert record.phases_s == pytest.approx({"queue": 0.0125, "prefill": 0.1, "total": 0.4, "ipc": 0.003})


def test_usage_that_comes_with_the_last_tokens_counts_them_once() -> None:
    record = RequestRecord("r", "/x")
    tokens = [Token(0, "a", (1,)) for _ in range(8)]
    record.see([*tokens, Finished(0, "length"), Usage(5, 8, {}), Done()], 1.0)
    assert record.n_completion_tokens == 8


def test_of_several_reasons_the_one_that_tells_most_stays() -> None:
    batch: list[Event] = [Finished(0, "length"), Finished(1, "stop")]
    assert record_of((101.0, batch)).finish_reason == "length"
    cancelled = record_of((101.0, [*batch, Finished(2, "cancelled")]))
    assert (cancelled.finish_reason, cancelled.is_cancelled) == ("cancelled", True)


def test_an_error_is_the_reason_and_keeps_its_code_but_no_text() -> None:
    record = record_of((101.0, [Finished(0, "length"), Error("worker_died", "SECRET words", "SECRET hint")]))
    assert (record.finish_reason, record.error) == ("error", "worker_died")
    assert "SECRET" not in repr(record)


def test_no_text_of_tokens_is_kept() -> None:
    assert "SECRET" not in repr(record_of((101.0, [Token(0, "SECRET", (1,))])))


def test_embedded_inputs_are_counted() -> None:
    assert record_of((101.0, [Embedded(0, b""), Embedded(1, b"")])).n_inputs == 2


def test_the_end_is_fixed_once() -> None:
    record = record_of()
    assert record.total_s > 0  # still running: up to now
    record.end(103.0)
    record.end(110.0)
    assert record.total_s == pytest.approx(3.0)
    assert record.ttft_s is None
    assert record.queue_s is None
