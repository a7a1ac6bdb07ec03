"""The scheduler's promises, one by one: the no-room table, chunks by time, waiting for a prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.events import Admitted, Finished, Progress, Token
from localllm.runtime.stream import collect
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import SPECS, Bench, truth

PROMPT = list(b"the quick brown fox jumps over the lazy dog, and so on and on.")


def _room(n_slots: int, pool_tokens: int) -> Bench:
    return Bench(FakeEngine(replace(SPEC, n_slots=n_slots, pool_tokens=pool_tokens)))


def test_no_free_slot_evicts_the_least_recently_used_retained_one() -> None:
    bench = _room(n_slots=3, pool_tokens=4096)
    old, newer, third = ([c] * 50 for c in (65, 66, 67))
    for prompt in (old, newer):
        bench.answer(prompt)
    bench.answer(third)
    assert bench.scheduler.stats.n_evictions == 1
    assert bench.answer(newer).usage.cached_tokens["device"] == 49
    assert bench.answer(old).usage.cached_tokens["device"] == 0


def test_full_pool_evicts_retained_prefixes_before_anything_running_suffers() -> None:
    bench = _room(n_slots=9, pool_tokens=300)
    for letter in range(65, 69):
        bench.answer([letter] * 60, ignore_eos=True)
    assert bench.scheduler.stats.n_evictions > 0
    assert bench.scheduler.stats.n_preemptions == 0


def test_engine_out_of_room_shrinks_the_chunk_before_it_preempts() -> None:
    engine = FakeEngine(replace(SPEC, max_batch_tokens=128), short_rooms={1})
    bench = Bench(engine)
    answer = bench.answer(PROMPT * 3)
    assert answer.choices[0].ids == truth(PROMPT * 3)
    assert engine.batches[0].n_rows <= 64
    assert bench.scheduler.stats.n_preemptions == 0


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    bench = _room(n_slots=9, pool_tokens=220)
    streams = [bench.submit([65 + i] * 50, max_tokens=80, ignore_eos=True) for i in range(3)]
    finished: list[int] = []

    def watch(_: int) -> None:
        finished.extend(
            i for i, s in enumerate(streams) if i not in finished and any(isinstance(e, Finished) for e in s._events)
        )

    bench.run(each_step=watch)
    watch(0)
    assert bench.scheduler.stats.n_preemptions > 0
    assert finished[0] == 0
    assert all(collect(s).choices[0].finish_reason == "length" for s in streams)


def test_the_only_one_running_ends_with_length_when_the_engine_has_no_room() -> None:
    engine = FakeEngine(SPEC, short_rooms=range(10, 10_000))
    bench = Bench(engine)
    answer = bench.answer(PROMPT, max_tokens=100, ignore_eos=True)
    assert answer.choices[0].finish_reason == "length"
    assert 0 < len(answer.choices[0].ids) < 100


def test_generation_ends_when_the_context_is_full() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=128, max_sequence_tokens=128)))
    answer = bench.answer([65] * 28, max_tokens=None, ignore_eos=True)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].ids) == answer.max_tokens == 100


def test_two_endless_clients_share_a_small_context_and_both_end() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=128, max_sequence_tokens=128, n_slots=3)))
    streams = [bench.submit(list(b"Once"), max_tokens=None, ignore_eos=True) for _ in range(2)]
    bench.run()
    assert [collect(s).choices[0].finish_reason for s in streams] == ["length", "length"]


def test_a_newcomer_advances_beside_decoding_sequences() -> None:
    bench = Bench(config=RuntimeConfig(itl_target_s=1e-9))
    running = bench.submit(PROMPT, max_tokens=60, ignore_eos=True)
    for _ in range(5):
        bench.step()
    bench.submit([65] * 200)
    bench.step()
    assert bench.engine.batches[-1].n_rows >= 1 + RuntimeConfig().min_chunk_tokens
    assert bench.scheduler.stats.n_floor_chunks == 1
    bench.run()
    assert collect(running).choices[0].finish_reason == "length"


def test_prefill_alone_takes_the_largest_batch_expected_to_fit_its_target() -> None:
    bench = Bench()
    for rows, elapsed_s in ((64, 0.064), (256, 0.256)):
        bench.cost.observe(rows, 0, elapsed_s)
    bench.scheduler._chunks._config = RuntimeConfig(prefill_target_s=0.1)
    bench.answer([65] * 200)
    assert bench.engine.batches[0].n_rows == 64


def test_followers_wait_for_the_one_that_computes_their_prefix() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=64)))
    shared = [70] * 300
    prompts = [[*shared, 65 + i] for i in range(4)]
    streams = [bench.submit(p) for p in prompts]
    bench.run()
    assert [collect(s).choices[0].ids for s in streams] == [truth(p) for p in prompts]
    n_shared_rows = sum(position < 300 for _, position in bench.engine.computed)
    assert n_shared_rows == 300


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("ending", ["cancel", "fail"])
def test_a_follower_takes_over_when_its_leader_ends(kind: str, ending: str) -> None:
    engine = FakeEngine(replace(SPECS[kind], max_batch_tokens=64), fail_forwards={3} if ending == "fail" else ())
    bench = Bench(engine)
    shared = [70] * 300
    leader = bench.submit([*shared, 65])
    bench.step()
    follower = bench.submit([*shared, 66])
    bench.step()
    if ending == "cancel":
        leader.cancel()
    bench.run()
    assert collect(follower).choices[0].ids == truth([*shared, 66])
    if ending == "cancel":
        assert sum(position < 300 for _, position in engine.computed) <= 300 + 64


def test_whole_match_is_taken_over_and_partial_match_is_copied() -> None:
    bench = Bench()
    first = bench.answer(PROMPT, ignore_eos=True)
    turn = [*PROMPT, *first.choices[0].ids, 65]
    bench.engine.edits.clear()
    bench.answer(turn, ignore_eos=True)
    assert bench.engine.edits == []
    bench.answer([*PROMPT, 66, 67])
    assert [type(e).__name__ for e in bench.engine.edits] == ["CopyPrefix"]


def test_a_copy_that_fails_is_computed_instead() -> None:
    bench = Bench(FakeEngine(fail_copies=True))
    bench.answer(PROMPT)
    answer = bench.answer([*PROMPT, 66, 67])
    assert answer.choices[0].ids == truth([*PROMPT, 66, 67])
    assert answer.usage.cached_tokens == {"device": 0}


def test_long_prompts_report_progress_and_cached_tokens_count_as_done() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=50)))
    stream = bench.submit([65] * 170)
    bench.run()
    events = list(stream)
    progress = [e for e in events if isinstance(e, Progress)]
    assert [p.done_tokens for p in progress] == [50, 100, 150]
    assert {p.total_tokens for p in progress} == {170}
    kinds = [type(e) for e in events]
    assert kinds.index(Admitted) < kinds.index(Progress) < kinds.index(Token)


def test_one_client_cannot_keep_another_waiting() -> None:
    bench = Bench(config=RuntimeConfig(max_running=2))
    crowd = [bench.submit([65 + i] * 20, client="crowd", ignore_eos=True) for i in range(16)]
    bench.step()
    newcomer = bench.submit([90] * 20, client="newcomer", ignore_eos=True)
    ended: list[object] = []

    def watch(_: int) -> None:
        ended.extend(s for s in [*crowd, newcomer] if s not in ended and s._ended)

    bench.run(each_step=watch)
    watch(0)
    assert ended.index(newcomer) <= 4


def test_pool_use_at_the_first_refusal_is_kept() -> None:
    bench = _room(n_slots=9, pool_tokens=220)
    assert bench.scheduler.stats.pool_use_at_first_refusal is None
    for i in range(3):
        bench.submit([65 + i] * 50, max_tokens=80, ignore_eos=True)
    bench.run()
    use = bench.scheduler.stats.pool_use_at_first_refusal
    assert use is not None
    assert 0.3 < use <= 1.0
