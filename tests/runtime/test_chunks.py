"""How long chunks are: under the target with who decodes counted in, small again after a refusal, then growing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from localllm.runtime.chunks import ChunkPolicy, shares
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.stream import collect
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import Bench, truth


def _policy() -> ChunkPolicy:
    cost = StepCost()
    for n_rows in (1, 8, 64, 256):
        cost.observe(n_rows, 0, n_rows * 0.001)
    return ChunkPolicy(SPEC, RuntimeConfig(itl_target_s=0.128), cost, RuntimeStats())


def test_rows_that_decode_count_in_the_time_between_two_tokens() -> None:
    assert _policy().prefill_rows(8, 0) == 128 - 8


def test_a_chunk_beside_slow_sequences_is_the_floor_or_a_quarter_of_the_step_and_little_more_in_time() -> None:
    """Whichever is more, and half as much again; the target yields to it, and that is counted."""
    for decode_s, expected in ((0.25, 32), (0.36, 128)):
        cost, stats = StepCost(), RuntimeStats()
        cost.observe(1, 0, decode_s)
        for n_rows in (2, 4, 8, 16, 32, 64, 128, 256):
            cost.observe(n_rows, 0, decode_s + (n_rows - 1) * 0.0009)
        policy = ChunkPolicy(SPEC, RuntimeConfig(itl_target_s=0.2), cost, stats)
        assert policy.prefill_rows(1, 0) + 1 >= expected
        floor_s = decode_s + max(32 * 0.0009, decode_s / 3)
        assert decode_s + policy.prefill_rows(1, 0) * 0.0009 <= 1.5 * floor_s
        assert stats.n_floor_chunks == 2


def test_a_chunk_beyond_the_target_is_as_long_as_its_rows_get_cheaper() -> None:
    for cost_of_64_s, expected in ((0.46, 64), (0.73, 32)):  # rows computed 64 at once are cheaper; or are not
        cost = StepCost()
        for n_rows, elapsed_s in ((1, 0.018), (8, 0.064), (16, 0.194), (32, 0.365), (64, cost_of_64_s), (128, 0.9)):
            cost.observe(n_rows, 0, elapsed_s)
        assert ChunkPolicy(SPEC, RuntimeConfig(itl_target_s=0.2), cost, RuntimeStats()).prefill_rows(8, 0) == expected


def test_each_client_has_a_part_of_a_step_and_the_oldest_what_is_left() -> None:
    def prefill(client: str, n_left: int, order: int) -> Any:
        return SimpleNamespace(run=SimpleNamespace(client=client), n_tokens=n_left, n_computed=0, order=order)

    def divided(*prefilling: Any, budget: int = 100) -> list[tuple[int, int]]:
        hashable = [_ById(**vars(s)) for s in prefilling]
        return [(s.order, n_rows) for s, n_rows in shares(hashable, budget)]  # type: ignore[arg-type]

    long, more, short = prefill("a", 900, 1), prefill("a", 50, 2), prefill("b", 30, 3)
    assert divided(long) == [(1, 100)]
    assert divided(long, more) == [(1, 100)]
    assert divided(long, more, short) == [(1, 70), (3, 30)]
    assert divided(prefill("a", 20, 1), more, short) == [(1, 20), (3, 30), (2, 50)]
    assert divided(long, prefill("b", 900, 2), prefill("c", 900, 3)) == [(1, 34), (2, 33), (3, 33)]
    assert divided(long, short, budget=1) == [(1, 1)]
    assert divided(long, short, budget=0) == []


class _ById(SimpleNamespace):
    """Hashed as sequences are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_a_long_prompt_does_not_stand_before_a_newcomers_short_one() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=64)))
    bench.submit([65] * 3000, client="long", max_tokens=1)
    bench.step()
    short = bench.submit([66] * 60, client="short", max_tokens=5)
    for _ in range(4):
        bench.step()
    assert any(type(e).__name__ == "Token" for e in short._events)
    bench.run()
    assert collect(short).choices[0].ids == truth([66] * 60, 5)


def test_a_shrunk_step_counts_every_row_and_grows_again() -> None:
    policy = _policy()
    assert policy.shrink(12, n_items=8)
    assert policy.prefill_rows(2, 0) == 4
    assert not policy.shrink(2, n_items=2)
    for _ in range(10):
        policy.relax()
    assert policy.prefill_rows(0, 0) == SPEC.max_batch_tokens


def test_the_last_token_of_a_long_prompt_runs_alone() -> None:
    bench = Bench()
    bench.cost.observe(1, 0, 1e-9)
    bench.cost.observe(128, 0, 0.1)
    prompt = [65] * 100
    assert bench.answer(prompt).choices[0].ids == truth(prompt)
    assert [b.n_rows for b in bench.engine.batches[:2]] == [99, 1]


def test_a_loop_with_work_does_not_sleep_between_steps() -> None:
    bench = Bench(FakeEngine())
    stream = bench.submit([65] * 20, ignore_eos=True)
    bench.step()
    assert bench.loop._wait_s == 0
    bench.run()
    assert bench.loop._wait_s is None
    assert len(collect(stream).choices[0].ids) == 20


def test_a_choice_that_fails_takes_the_others_of_its_request_with_it_and_nobody_else() -> None:
    class Nan(FakeEngine):
        def _logits(self, tokens: object) -> object:  # type: ignore[override]
            row = super()._logits(tokens)  # type: ignore[arg-type]
            if tokens[0] == 66 and len(tokens) > 22:  # type: ignore[index,arg-type]
                row[:] = float("nan")
            return row

    bench = Bench(Nan())
    bad, good = bench.submit([66] * 20, n=3, ignore_eos=True), bench.submit([65] * 20)
    bench.run()
    assert [e.code for e in bad if type(e).__name__ == "Error"] == ["engine_error"]
    assert collect(good).choices[0].ids == truth([65] * 20)


def test_no_row_is_left_for_a_chunk_beside_as_many_as_the_engine_takes() -> None:
    cost = StepCost()
    cost.observe(1, 0, 1.0)
    policy = ChunkPolicy(SPEC, RuntimeConfig(), cost, RuntimeStats())
    assert policy.prefill_rows(SPEC.max_batch_tokens, 0) == 0


def test_fixed_chunks_end_at_the_same_places_whatever_steps_cost() -> None:
    """On a machine that is slow or disturbed too: else a golden answer would move by itself."""
    prompt = list(range(60, 60 + 64)) * 8
    shapes = []
    for ms_of_a_row in (0.01, 5.0, 400.0):
        bench = Bench(FakeEngine(), config=RuntimeConfig(fixed_chunks=True))
        for n_rows in (1, 8, 64, 256):
            for _ in range(9):
                bench.cost.observe(n_rows, 0, n_rows * ms_of_a_row / 1e3)
        stream = bench.submit(prompt, max_tokens=2)
        bench.run()
        assert collect(stream).choices[0].ids == truth(prompt)[:2]
        shapes.append([batch.n_rows for batch in bench.engine.batches])
    assert shapes[0][:3] == [256, 255, 1]
    assert shapes[0] == shapes[1] == shapes[2]
