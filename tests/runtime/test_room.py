"""Who gets which slot and cells, at the exact edges: admission, take-over or copy, waiting, eviction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.engine import EditResult, EngineSpec, PrefixRule, Truncate
from localllm.runtime.kv.blocks import NO_ROOT
from localllm.runtime.kv.tiers import no_tiers
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.room import Room
from localllm.runtime.sequence import Sequence
from localllm.runtime.stream import collect
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import SPECS, Bench, HalfRight, truth


def _bench(**spec: object) -> Bench:
    return Bench(FakeEngine(replace(SPEC, **spec)))  # type: ignore[arg-type]


def _room(spec: EngineSpec) -> Room:
    return Room(spec, RuntimeStats(), no_tiers(spec), StepCost())


def _sequence(tokens: list[int]) -> Sequence:
    bench = Bench()
    bench.submit(tokens)
    bench.step()
    (sequence,) = bench.scheduler._running or bench.scheduler._waiting
    sequence.slot = None
    return sequence


def _running(bench: Bench) -> int:
    bench.step()
    return bench.scheduler.stats.n_running


def test_a_newcomer_needs_cells_for_its_prompt_and_one_token() -> None:
    for n_prompt, n_running in ((49, 2), (50, 1)):
        bench = _bench(pool_tokens=100)
        bench.submit([65] * 50, ignore_eos=True)
        bench.submit([66] * n_prompt, ignore_eos=True)
        assert _running(bench) == n_running
        bench.run()


def test_a_newcomer_counts_what_others_are_still_to_compute() -> None:
    bench = _bench(pool_tokens=200, max_batch_tokens=32)
    bench.submit([65] * 150, ignore_eos=True)
    bench.step()
    bench.submit([66] * 80, ignore_eos=True)
    assert _running(bench) == 1
    bench.run()
    assert bench.scheduler.stats.n_preemptions == 0


def test_a_newcomer_that_shares_its_prompt_needs_only_the_rest() -> None:
    bench = _bench(pool_tokens=200)
    bench.submit([65] * 120, ignore_eos=True, max_tokens=30)
    bench.step()
    bench.submit([*[65] * 120, 66], ignore_eos=True, max_tokens=5)
    assert _running(bench) == 2
    bench.run()


def test_no_more_run_at_once_than_a_step_has_rows() -> None:
    bench = _bench(max_batch_tokens=2)
    for i in range(5):
        bench.submit([65 + i] * 4, ignore_eos=True)
    assert _running(bench) == 2
    bench.run()


def test_a_plan_never_asks_for_more_cells_than_the_ledger_has() -> None:
    for kind, spec in SPECS.items():
        bench = Bench(FakeEngine(replace(spec, pool_tokens=150)), drafter=HalfRight())
        streams = [bench.submit([65 + i] * 35, max_tokens=50, ignore_eos=True) for i in range(5)]
        bench.run()
        assert bench.engine.n_no_room == 0, kind
        assert all(len(collect(s).choices[0].ids) == 50 for s in streams)


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=120)), drafter=HalfRight(6))
    for i in range(2):
        bench.submit([65 + i] * 40, max_tokens=80, ignore_eos=True)
    most_used = 0
    while not bench.scheduler.stats.n_preemptions:
        most_used = bench.scheduler.stats.used_cells
        bench.step()
    assert most_used >= 119
    bench.run()


def test_an_engine_without_room_loses_a_retained_slot_before_the_chunk_shrinks() -> None:
    bench = Bench(FakeEngine(SPEC, room_tokens=150))
    bench.answer([65] * 60)
    bench.answer([66] * 100)
    assert bench.scheduler.stats.n_evictions == 1
    assert max(b.n_rows for b in bench.engine.batches) >= 99  # the last row may run alone


def test_preemption_counts_what_is_computed_again() -> None:
    bench = _bench(pool_tokens=150)
    for i in range(3):
        bench.submit([65 + i] * 40, max_tokens=40, ignore_eos=True)
    bench.run()
    stats = bench.scheduler.stats
    assert stats.n_preemptions > 0
    assert stats.n_recomputed_tokens >= 40 * stats.n_preemptions


def test_gauges_and_cached_tokens_follow_what_happens() -> None:
    bench = _bench()
    first = bench.answer([65] * 40, ignore_eos=True)
    stats = bench.scheduler.stats
    n_held = 40 + len(first.choices[0].ids) - 1
    assert (stats.n_retained_slots, stats.used_cells, stats.n_prompt_tokens_cached) == (1, n_held, 0)
    bench.answer([65] * 40, n=3, ignore_eos=True)
    assert stats.n_prompt_tokens_cached == 39
    assert stats.n_prompt_tokens_computed >= 40


def test_a_copied_prefix_is_recently_used() -> None:
    bench = _bench(n_slots=4)
    bench.answer([65] * 50)
    bench.answer([66] * 50)
    bench.answer([*[65] * 30, 67])
    bench.answer([68] * 50)  # takes the slot of the 66s, used longest ago
    assert bench.answer([65] * 50).usage.cached_tokens["device"] == 49


def test_a_slot_that_shares_but_a_header_with_others_is_given_up_in_its_turn() -> None:
    bench = _bench(n_slots=5)
    for i in range(5):
        bench.answer([1, *[65 + i] * 30])
    assert 65 not in {tokens for slot in bench.engine.slots for tokens in slot.tokens[1:2]}


def test_a_whole_retained_match_wins_over_an_equal_running_one() -> None:
    room = _room(SPEC)
    running, retained = room.slots.take_free(), room.slots.take_free()
    assert running is not None
    assert retained is not None
    sequence = _sequence([65] * 60)
    for slot, tokens in ((running, [65] * 50), (retained, [65] * 50)):
        room.slots.grow(slot, len(tokens))
        room._cache.insert(NO_ROOT, slot.id, tokens)
    room.slots.retain(retained)
    assert room.seat(sequence)
    assert sequence.slot is retained
    assert room.edits.take() == ()


def test_who_was_preempted_returns_before_newcomers() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=150)), RuntimeConfig(max_running=3))
    streams = [bench.submit([65 + i] * 40, max_tokens=40, ignore_eos=True) for i in range(5)]
    order: list[object] = []

    def watch(_: int) -> None:
        order.extend(s for s in streams if s._ended and s not in order)

    bench.run(each_step=watch)
    watch(0)
    assert bench.scheduler.stats.n_preemptions > 0
    assert order == streams


def test_a_copy_that_costs_cells_is_not_asked_for_without_them() -> None:
    bench = Bench(FakeEngine(replace(SPECS["unshared copies"], pool_tokens=150)))
    shared = [70] * 60
    streams = [bench.submit([*shared, 65 + i], max_tokens=8, ignore_eos=True) for i in range(4)]
    bench.run()
    assert bench.engine.n_no_room == 0
    assert all(len(collect(s).choices[0].ids) == 8 for s in streams)


def test_a_copied_slot_can_be_forked_where_its_source_could() -> None:
    bench = Bench(FakeEngine(replace(SPECS["recurrent"], n_slots=3)))
    shared = [70] * 60
    for stream in [bench.submit([*shared, *[65 + i] * 40]) for i in range(2)]:
        bench.run()
        assert collect(stream).choices[0].ids
    for slot in tuple(bench.scheduler._room.slots.retained()):
        assert 60 in [c.n_tokens for c in slot.checkpoints]


def test_a_copy_lacks_the_window_that_its_source_lacks_and_an_empty_slot_lacks_nothing() -> None:
    slots = _room(SPECS["window"]).slots
    source, copied = slots.take_free(), slots.take_free()
    assert source is not None
    assert copied is not None
    slots.grow(source, 50)
    source.first_held, source.is_settling = 20, True
    slots.copy(source, copied, 50)
    assert copied.first_held == 20
    slots.cut(source, 0)
    assert (source.first_held, source.is_settling) == (0, False)


def test_prompts_that_share_little_do_not_wait_for_each_other() -> None:
    bench = _bench()
    bench.submit([*[70] * 10, *[65] * 50])
    bench.submit([*[70] * 10, *[66] * 50])
    assert _running(bench) == 2
    bench.run()


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "everything hard", "window"])
def test_the_leaders_chunk_ends_where_a_follower_forks(kind: str) -> None:
    bench = Bench(FakeEngine(replace(SPECS[kind], max_batch_tokens=64)))
    shared = [70] * 100
    prompts = [[*shared, *[65 + i] * 70] for i in range(2)]
    streams = [bench.submit(p) for p in prompts]
    bench.run()
    assert [collect(s).choices[0].ids for s in streams] == [truth(p) for p in prompts]
    assert sum(position < 100 for _, position in bench.engine.computed) == 100


def test_checkpoints_are_taken_only_where_prefixes_cannot_be_cut() -> None:
    for kind, spec in SPECS.items():
        bench = Bench(FakeEngine(replace(spec, max_batch_tokens=64)))
        for prompt in ([*[70] * 100, 65], [*[70] * 100, 66]):
            bench.submit(prompt)
        bench.run()
        assert (bench.engine.n_checkpoints > 0) == (spec.prefix_rule is PrefixRule.CHECKPOINT), kind


def test_the_newest_checkpoints_are_kept() -> None:
    room = _room(SPECS["recurrent"])
    slot = room.slots.take_free()
    assert slot is not None
    for n in range(1, 8):
        room.slots.grow(slot, 1)
        room.add_checkpoint(slot, bytes([n]))
    assert [c.n_tokens for c in slot.checkpoints] == [4, 5, 6, 7]


def test_what_an_edit_cost_of_the_window_is_taken_over() -> None:
    room = _room(SPECS["window"])
    slot = room.slots.take_free()
    assert slot is not None
    room.slots.grow(slot, 50)
    room.edits.settled([Truncate(slot.id, 40)], [EditResult(40, first_held=12)])
    assert (slot.n_held, slot.first_held) == (40, 12)


def test_a_rolled_back_slot_is_not_copied_before_it_ran_again() -> None:
    """The fake engine breaks where a pending slot is copied; every step offers one to copy."""
    bench = Bench(FakeEngine(SPECS["hybrid"]), RuntimeConfig(min_wait_prefix_tokens=1), HalfRight(3))
    leader = bench.submit([65] * 30, max_tokens=40, ignore_eos=True)
    bench.step()
    (sequence,) = bench.scheduler._running
    others = []
    while not leader._ended:
        n_held = len(sequence.tokens) - 1
        others.append((bench.submit([*sequence.tokens[:n_held], 64], max_tokens=1), [*sequence.tokens[:n_held], 64]))
        bench.step()
    bench.run()
    assert all(collect(s).choices[0].ids == truth(p, 1) for s, p in others)
