"""Measuring a service that has no model: what is run, how it is counted, and what an interruption leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from localllm.bench.engine import watch as watching
from localllm.bench.engine.measuring import (
    Sizes,
    Subject,
    context_tokens,
    measure_decode,
    measure_deep,
    measure_overhead,
    measure_parallel,
    measure_prefill,
    rate_row,
)
from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.rows import Case
from localllm.bench.engine.watch import NeverTogether, Prompts, Timeline, seconds_per_step, watch
from localllm.errors import EngineError
from localllm.runtime.engine import Batch
from tests.bench.engine.rows import FACTS
from tests.fake_engine import SPEC, FakeEngine, fake_service


class FakeBare:
    """A bare loop that says how long it took."""

    def __init__(self, seconds_per_step: float) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self._seconds = seconds_per_step

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> float:
        self.asked.append(([len(p) for p in prompts], n_steps))
        return self._seconds * n_steps


def takes_a_moment(batch: Batch) -> None:
    """Make steps longer than it takes to read their tokens, as real ones are."""
    time.sleep(0.002)


def subject(engine: FakeEngine) -> Subject:
    return Subject(fake_service(engine), FACTS, Prompts(SPEC.n_vocab))


def engine_of(n_running: int, *, retained: int = 0, **knobs: object) -> FakeEngine:
    return FakeEngine(replace(SPEC, n_slots=n_running + retained + 1), **knobs)  # type: ignore[arg-type]


def test_prompts_never_begin_alike_and_are_the_same_each_time() -> None:
    once, again = Prompts(100), Prompts(100)
    drawn = [once.draw(5) for _ in range(100)]
    assert drawn == [again.draw(5) for _ in range(100)]
    assert len({prompt[0] for prompt in drawn}) == 100
    assert all(len(prompt) == 5 and all(0 <= token < 100 for token in prompt) for prompt in drawn)


def test_every_token_of_every_answer_is_timed() -> None:
    engine = engine_of(3)
    prompts = Prompts(SPEC.n_vocab)
    with fake_service(engine) as service:
        found = watch(service, [prompts.draw(20) for _ in range(3)], 12)
    assert [len(t.token_s) for t in found] == [12, 12, 12]
    assert all(list(t.token_s) == sorted(t.token_s) and t.token_s[0] > t.submitted_s for t in found)
    assert [(t.prompt_tokens, t.cached_tokens) for t in found] == [(20, 0)] * 3


def test_an_error_of_the_engine_is_raised_and_the_others_are_cancelled() -> None:
    engine = engine_of(2, fail_forwards=range(3, 50))
    prompts = Prompts(SPEC.n_vocab)
    with fake_service(engine) as service, pytest.raises(EngineError):
        watch(service, [prompts.draw(10), prompts.draw(10)], 20)


def test_pace_counts_only_while_all_decode() -> None:
    early = Timeline(0.0, tuple(float(i) for i in range(1, 11)), 1, 0)  # alone until 4: not counted
    late = Timeline(0.0, tuple(4.0 + 2.0 * i for i in range(6)), 1, 0)
    assert seconds_per_step([early, late]) == pytest.approx((1.0 + 2.0) / 2)
    with pytest.raises(NeverTogether):
        seconds_per_step([early, Timeline(0.0, (20.0, 21.0), 1, 0)])


def test_sequences_that_once_missed_each_other_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [Timeline(0.0, (1.0, 2.0), 1, 0), Timeline(0.0, (3.0, 4.0), 1, 0)]
    together = [Timeline(0.0, (1.0, 2.0, 3.0), 1, 0)] * 2
    found = iter([apart, together])
    monkeypatch.setattr(watching, "watch", lambda *_: next(found))
    engine = engine_of(1)
    service = subject(engine).service
    assert watching.pace_s(service, [(1,), (2,)], 3) == pytest.approx(1.0)
    service.close()


def test_sequences_that_always_miss_each_other_are_a_note_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [Timeline(0.0, (1.0, 2.0), 1, 0), Timeline(0.0, (3.0, 4.0), 1, 0)]
    monkeypatch.setattr(watching, "watch", lambda *_: apart)
    found, recorder = subject(engine_of(2)), Recorder()
    measure_parallel(found, Case(n_gen=4, n_parallel=2), 2, recorder)
    measure_overhead(found, FakeBare(0.001), Case(n_gen=4, n_depth=3, n_parallel=2), 2, recorder)
    found.service.close()
    assert recorder.rows == []
    assert [note.partition(":")[0] for note in recorder.notes] == ["tg4 x2", "tg4 @ d3 x2"]


def test_prefill_is_one_prompt_and_one_token_a_repetition() -> None:
    engine, recorder = engine_of(1), Recorder()
    found = subject(engine)
    measure_prefill(found, Case(n_prompt=40), 3, recorder)
    found.service.close()
    (row,) = recorder.rows
    assert (row.case.name, len(row.samples_ns), row.partial) == ("pp40", 3, False)
    assert sum(batch.n_rows for batch in engine.batches) == 40 * 4  # three and the warm-up, none from a cache


def test_decode_counts_as_many_steps_as_tokens() -> None:
    engine, recorder = engine_of(1), Recorder()
    found = subject(engine)
    measure_decode(found, Case(n_gen=16), 2, recorder, lambda rate: {"bandwidth_share": rate})
    found.service.close()
    (row,) = recorder.rows
    assert row.case.name == "tg16"
    assert sum(batch.n_rows for batch in engine.batches) == 1 + 2 * 16
    assert row.flat()["bandwidth_share"] == pytest.approx(row.avg_ts)


def test_depth_is_held_not_computed() -> None:
    engine, recorder = engine_of(1, retained=1), Recorder()
    found = subject(engine)
    measure_deep(found, Case(n_prompt=40, n_depth=64), 3, recorder)
    found.service.close()
    (row,) = recorder.rows
    assert (row.case.name, len(row.samples_ns)) == ("pp40 @ d64", 3)
    assert recorder.notes == []
    # the warm-up's prompt, the prefix once, and a repetition: a prompt and at most a few rows of the prefix
    assert sum(batch.n_rows for batch in engine.batches) <= 40 + 64 + 3 * (40 + 8)


def test_a_model_that_cannot_hold_the_depth_gets_a_note_and_no_row() -> None:
    engine, recorder = engine_of(1, fail_copies=True), Recorder()
    found = subject(engine)
    measure_deep(found, Case(n_prompt=40, n_depth=64), 3, recorder)
    found.service.close()
    if recorder.rows:  # with one slot the prefix is taken over, not copied: then it must be held
        assert recorder.notes == []
    else:
        assert "pp40 @ d64" in recorder.notes[0]


def test_parallel_rows_decode_together() -> None:
    widths: list[int] = []

    def see(batch: Batch) -> None:
        widths.append(len(batch.items))
        takes_a_moment(batch)

    engine, recorder = engine_of(4, on_forward=see), Recorder()
    found = subject(engine)
    measure_parallel(found, Case(n_gen=10, n_parallel=4), 2, recorder)
    found.service.close()
    (row,) = recorder.rows
    assert row.flat()["n_parallel"] == 4
    assert row.case.n_tokens == 40
    assert widths.count(4) >= 2 * 10


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_overhead_is_a_ratio_of_speeds_over_the_same_work(n_parallel: int) -> None:
    engine, bare, recorder = engine_of(n_parallel, on_forward=takes_a_moment), FakeBare(1e-9), Recorder()
    found = subject(engine)
    measure_overhead(found, bare, Case(n_gen=10, n_depth=6, n_parallel=n_parallel), 3, recorder)
    found.service.close()
    (row,) = recorder.rows
    flat = row.flat()
    assert bare.asked == [([6] * n_parallel, 17)] * 4  # three pairs and the warm-up
    assert 0 < flat["overhead_ratio_low"] <= flat["overhead_ratio"] <= flat["overhead_ratio_high"] < 1
    assert flat["bare_avg_ts"] == pytest.approx(1e9 * n_parallel)


def test_a_slower_bare_loop_gives_a_ratio_above_one() -> None:
    engine, recorder = engine_of(1), Recorder()
    found = subject(engine)
    measure_overhead(found, FakeBare(1.0), Case(n_gen=5, n_depth=4), 2, recorder)
    found.service.close()
    assert recorder.rows[0].flat()["overhead_ratio"] > 1


def test_interrupted_repetitions_are_kept_and_marked() -> None:
    recorder = Recorder()
    left = iter([1.0, 2.0])

    def once() -> float:
        for value in left:
            return value
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder.repeat("tg8", 5, once, rate_row(FACTS, Case(n_gen=8)))
    (row,) = recorder.rows
    assert row.partial
    assert row.samples_ts == (8.0, 4.0)


def test_progress_tells_every_repetition() -> None:
    heard: list[tuple[str, int, int]] = []
    recorder = Recorder(lambda what, done, total: heard.append((what, done, total)))
    recorder.repeat("tg8", 2, lambda: 1.0, rate_row(FACTS, Case(n_gen=8)))
    assert heard == [("tg8", 0, 2), ("tg8", 1, 2), ("tg8", 2, 2)]


def test_sizes_say_how_much_context_they_need() -> None:
    sizes = Sizes()
    assert context_tokens(sizes.deep) == 512 + 512 + 8
    assert context_tokens(sizes.overhead_parallel) == 4 * (32 + 24 + 8)
