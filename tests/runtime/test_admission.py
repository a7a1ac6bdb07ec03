"""Who gets on and off: a place for every newcomer, and requests that run alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.events import Admitted, Done, Error, Finished
from localllm.runtime.stream import TokenStream, collect
from tests.fake_engine import EOS, SPEC, FakeEngine, next_token
from tests.runtime.harness import SPECS, Bench, truth

EIGHT = RuntimeConfig(max_running=8)


def _bench(pool_tokens: int = 4096, n_slots: int = 13, max_running: int = 8) -> Bench:
    engine = FakeEngine(replace(SPEC, n_slots=n_slots, pool_tokens=pool_tokens))
    return Bench(engine, RuntimeConfig(max_running=max_running))


def _steps_until(bench: Bench, stream: TokenStream, kind: type = Admitted, at_most: int = 400) -> int:
    """Step until a kind of event came; return how many steps that took."""
    for n in range(at_most):
        if any(isinstance(event, kind) for event in stream._events):
            return n
        bench.step()
    raise AssertionError(f"no {kind.__name__} in {at_most} steps")


def _long(bench: Bench, letter: int, client: str, **options: object) -> TokenStream:
    return bench.submit([letter] * 30, client=client, max_tokens=300, ignore_eos=True, **options)


def test_a_newcomer_is_admitted_at_once_beside_one_client_with_32_requests() -> None:
    bench = _bench()
    streams = [_long(bench, 33 + i, "hoarder") for i in range(32)]
    for _ in range(20):
        bench.step()
    assert bench.scheduler.stats.n_running == 8  # the ninth seat is kept
    newcomer = bench.submit([65] * 30, client="newcomer")
    assert _steps_until(bench, newcomer) == 1
    assert bench.scheduler.stats.n_running == 9
    assert not any(isinstance(e, Finished) for s in streams for e in s._events)
    bench.run()
    assert collect(newcomer).choices[0].ids == truth([65] * 30)


def test_a_newcomer_is_admitted_at_once_beside_eight_clients() -> None:
    bench = _bench()
    for i in range(8):
        _long(bench, 33 + i, f"client {i}")
    for _ in range(10):
        bench.step()
    newcomer = bench.submit([65] * 30, client="newcomer")
    assert _steps_until(bench, newcomer) == 1


def test_the_kept_seat_serves_one_newcomer_after_the_other() -> None:
    bench = _bench()
    for i in range(12):
        _long(bench, 33 + i, "hoarder")
    for n in range(4):
        newcomer = bench.submit([65 + n] * 30, client=f"newcomer {n}", max_tokens=5, ignore_eos=True)
        assert _steps_until(bench, newcomer) <= 2
        _steps_until(bench, newcomer, Done)


def test_a_client_gets_no_second_sequence_from_the_kept_seat() -> None:
    bench = _bench()
    for i in range(10):
        _long(bench, 33 + i, "hoarder")
    bench.step()
    first, second = (_long(bench, 65 + i, "newcomer") for i in range(2))
    for _ in range(20):
        bench.step()
    assert any(isinstance(e, Admitted) for e in first._events)
    assert not any(isinstance(e, Admitted) for e in second._events)


def test_no_seat_is_kept_where_there_is_no_slot_for_it() -> None:
    bench = _bench(n_slots=3, max_running=2)
    for i in range(2):
        _long(bench, 33 + i, "hoarder")
    bench.step()
    newcomer = bench.submit([65] * 30, client="newcomer")
    for _ in range(20):
        bench.step()
    assert bench.scheduler.stats.n_running == 2
    bench.run()
    assert collect(newcomer).choices[0].ids == truth([65] * 30)


def test_cells_for_a_newcomer_come_from_who_runs_several() -> None:
    bench = _bench(pool_tokens=400)
    hoarded = [_long(bench, 33 + i, "hoarder") for i in range(3)]
    for _ in range(60):
        bench.step()  # 3 * 90 cells, and growing
    newcomer = bench.submit([65] * 200, client="newcomer", max_tokens=8, ignore_eos=True)
    assert _steps_until(bench, newcomer) == 1
    assert bench.scheduler.stats.n_preemptions == 1
    bench.run()
    assert collect(newcomer).choices[0].finish_reason == "length"
    answers = [collect(stream).choices[0].ids for stream in hoarded]
    alone = _bench()
    assert answers == [collect(_run(alone, 33 + i)).choices[0].ids[: len(answers[i])] for i in range(3)]


def _run(bench: Bench, letter: int) -> TokenStream:
    stream = _long(bench, letter, "")
    bench.run()
    return stream


def test_nobodys_only_sequence_gives_its_cells_to_a_newcomer() -> None:
    bench = _bench(pool_tokens=400)
    for i in range(3):
        _long(bench, 33 + i, f"client {i}")
    for _ in range(60):
        bench.step()
    bench.submit([65] * 200, client="newcomer")
    for _ in range(10):
        bench.step()
    assert bench.scheduler.stats.n_preemptions == 0
    assert bench.scheduler.stats.n_running == 3


def test_a_more_urgent_sequence_does_not_make_way() -> None:
    bench = _bench(pool_tokens=400)
    for i in range(3):
        _long(bench, 33 + i, "hoarder", priority=1)
    for _ in range(60):
        bench.step()
    bench.submit([65] * 200, client="newcomer")
    for _ in range(10):
        bench.step()
    assert bench.scheduler.stats.n_preemptions == 0


def test_a_newcomer_that_would_not_fit_anyway_costs_nobody_a_preemption() -> None:
    bench = _bench(pool_tokens=400)
    for i in range(3):
        _long(bench, 33 + i, "hoarder")
    for _ in range(60):
        bench.step()
    newcomer = bench.submit([65] * 390, client="newcomer", max_tokens=3)
    for _ in range(10):
        bench.step()
    assert bench.scheduler.stats.n_preemptions == 0
    bench.run()
    assert collect(newcomer).choices[0].ids == truth([65] * 390, 3)


def test_who_runs_most_is_preempted_before_who_came_last() -> None:
    bench = _bench(pool_tokens=300)
    for i in range(2):
        _long(bench, 33 + i, "hoarder")
    bench.step()
    last = _long(bench, 65, "one")
    for _ in range(400):
        bench.step()
        if bench.scheduler.stats.n_preemptions:
            break
    assert [s.run.client for s in bench.scheduler._running] == ["hoarder", "one"]
    bench.run()
    assert collect(last).choices[0].finish_reason == "length"


def test_a_short_prompt_of_a_newcomer_passes_a_long_one_that_waits_for_room() -> None:
    bench = _bench(pool_tokens=300)
    for i in range(1):
        _long(bench, 33 + i, "hoarder")
    bench.step()
    waits = bench.submit([70] * 280, client="hoarder", max_tokens=3)
    bench.step()
    newcomer = bench.submit([65] * 30, client="newcomer", max_tokens=5)
    assert _steps_until(bench, newcomer) == 1
    assert not any(isinstance(e, Admitted) for e in waits._events)
    bench.run()
    assert collect(waits).choices[0].ids == truth([70] * 280, 3)


# --- requests that run alone


@pytest.mark.parametrize("kind", SPECS)
def test_a_lone_request_waits_for_those_running_and_those_behind_wait_for_it(kind: str) -> None:
    bench = Bench(FakeEngine(replace(SPECS[kind], n_slots=9)), EIGHT)
    before = [bench.submit([65 + i] * 30, client=f"a{i}", ignore_eos=True) for i in range(3)]
    bench.step()
    lone = bench.submit([75] * 30, client="b", n=2, ignore_eos=True, is_lone=True)
    behind = [bench.submit([80 + i] * 30, client=f"c{i}", ignore_eos=True) for i in range(3)]
    texts = bench.embed([[90] * 30], client="d")
    bench.run()
    assert bench.watch.between(lone.request_id) == set()
    steps = bench.watch.steps
    first = next(at for at, step in enumerate(steps) if lone.request_id in step)
    assert all(stream.request_id not in step for stream in (*behind, texts) for step in steps[:first])
    assert all(stream.request_id not in step for stream in before for step in steps[first:])
    for stream in (*before, lone, *behind):
        assert all(choice.finish_reason == "length" for choice in collect(stream).choices)
    assert isinstance(list(texts)[-1], Done)


def test_a_lone_request_on_an_idle_engine_begins_at_once() -> None:
    bench = _bench()
    stream = bench.submit([65] * 30, is_lone=True)
    assert _steps_until(bench, stream) == 1
    bench.run()
    assert collect(stream).choices[0].ids == truth([65] * 30)


def test_lone_texts_are_embedded_without_anyone_between_them() -> None:
    bench = _bench()
    before = _long(bench, 33, "a")
    bench.step()
    lone = bench.embed([[65] * 100, [66] * 100, [67]], is_lone=True)
    behind = bench.submit([70] * 30, client="b", priority=9)
    bench.run()
    assert bench.watch.between(lone.request_id) == set()
    for stream in (before, behind):
        assert isinstance(list(stream)[-1], Done)


def test_a_lone_request_that_is_cancelled_or_fails_lets_the_others_go_on() -> None:
    bench = Bench(FakeEngine(fail_forwards={6}), EIGHT)
    cancelled = bench.submit([65] * 30, is_lone=True)
    queued = bench.submit([66] * 30, is_lone=True)
    failing = bench.submit([67] * 30, is_lone=True, ignore_eos=True)
    behind = bench.submit([68] * 30)
    bench.step()
    cancelled.cancel()
    queued.cancel()
    bench.run()
    assert collect(cancelled).choices[0].finish_reason == "cancelled"
    assert collect(queued).choices[0].finish_reason == "cancelled"
    assert isinstance(list(failing)[-1], Error)
    assert collect(behind).choices[0].ids == truth([68] * 30)


def test_a_lone_request_out_of_cells_ends_by_length_not_by_preempting_itself_for_ever() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=60), script=lambda t: max(33, next_token(t) % EOS)), EIGHT)
    stream = bench.submit([65] * 40, is_lone=True, max_tokens=50, ignore_eos=True)
    bench.run()
    assert collect(stream).choices[0].finish_reason == "length"
