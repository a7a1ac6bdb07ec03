"""Whatever the engine refuses, loses or fails: right answers or an error, one end each, and books that add up.

Every kind of spec, random requests and random faults (seeded); then each fault once found, by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.draft.base import Draft, Drafted
from localllm.runtime.embedding import unit_bytes
from localllm.runtime.engine import CopyPrefix, Edit, EngineSpec, PrefixRule, Rewind, Truncate
from localllm.runtime.events import Admitted, Done, Embedded, Error, Event
from localllm.runtime.stream import TokenStream, collect
from tests.fake_engine import SPEC, FakeEngine, fake_embedding
from tests.runtime.harness import SPECS, Bench, HalfRight, truth

N_REQUESTS = 16


def _prompts(rng: random.Random, longest: int = 70) -> list[list[int]]:
    prompts: list[list[int]] = []
    for _ in range(N_REQUESTS):
        base = rng.choice(prompts)[: rng.randint(1, longest)] if prompts and rng.random() < 0.6 else []
        prompts.append((base + [rng.randint(32, 126) for _ in range(rng.randint(1, longest))])[:110])
    return prompts


def _hard_spec(rng: random.Random, spec: EngineSpec) -> EngineSpec:
    return replace(
        spec,
        pool_tokens=rng.choice([130, 200, 260, 420, 1000]),
        n_slots=rng.choice([2, 2, 3, 4, 9]),
        max_batch_tokens=rng.choice([4, 9, 33, 256]),
        max_embed_rows=rng.choice([1, 7, 64]),
        window_tokens=rng.choice([2, 8, 24, 60]) if spec.prefix_rule is PrefixRule.WINDOW else 0,
    )


def _bench(rng: random.Random, spec: EngineSpec) -> Bench:
    share_refused = rng.choice([0, 0, 0.05, 0.3, 1.0])
    engine = FakeEngine(
        spec,
        refuses=lambda edit: rng.random() < share_refused,
        fail_forwards={rng.randint(1, 300) for _ in range(rng.choice([0, 0, 3, 12]))},
        fail_edits={rng.randint(1, 200) for _ in range(rng.choice([0, 0, 6]))},
        short_rooms={rng.randint(1, 300) for _ in range(rng.choice([0, 4, 30]))},
        fail_embeds={rng.randint(1, 40) for _ in range(rng.choice([0, 0, 2]))},
        short_embeds={rng.randint(1, 40) for _ in range(rng.choice([0, 0, 4]))},
        room_tokens=None if rng.random() < 0.6 else int(spec.pool_tokens * rng.uniform(0.6, 0.95)),
    )
    config = RuntimeConfig(
        min_chunk_tokens=rng.choice([1, 7, 32]),
        min_wait_prefix_tokens=rng.choice([1, 8, 32]),
        max_running=rng.choice([None, 1, 2, 3]),
        itl_target_s=rng.choice([1e-9, 0.2]),
    )
    return Bench(engine, config, HalfRight(rng.randint(1, 6)) if rng.random() < 0.6 else None)


def _check_books(bench: Bench) -> None:
    """Nothing is left behind, and the ledger says of every slot what the engine holds."""
    bench.engine._fail_edits.clear()
    bench.step()
    bench.step()
    scheduler, room = bench.scheduler, bench.scheduler._room
    assert not scheduler._readers._runs
    assert not room._tenants
    assert not scheduler._waiting._tickets
    assert not scheduler._waiting.n_requests
    assert scheduler.stats.n_running == scheduler.stats.n_waiting == 0
    settling = [bench.engine.slots[s.id].settling for s in room.slots._slots]
    assert [s.is_settling for s in room.slots._slots] == settling
    assert room._cache._ends.keys() == {s.id for s in room.slots._slots if s.n_held}
    assert room.slots.n_retained + len(room.slots._free) == bench.engine.spec.n_slots - 1
    assert [len(bench.engine.slots[s.id].tokens) for s in room.slots._slots] == [s.n_held for s in room.slots._slots]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", SPECS)
def test_any_fault_gives_right_answers_or_an_error_and_one_end_each(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind}{seed}")
    bench, prompts = _bench(rng, _hard_spec(rng, SPECS[kind])), _prompts(rng)
    may_fail = bool(bench.engine._fail_forwards or bench.engine._fail_edits)
    streams, cancelled, n_choices, lone = list[TokenStream](), set[int](), list[int](), list[TokenStream]()
    texts = list[tuple[TokenStream, list[list[int]]]]()

    def feed(_: int) -> None:
        who: dict[str, Any] = {"client": rng.choice("abc"), "is_lone": rng.random() < 0.1}
        if len(streams) < N_REQUESTS and rng.random() < 0.5:
            n_choices.append(rng.choice([1, 1, 1, 3]))
            wish = {"n": n_choices[-1], "max_tokens": rng.choice([1, 5, 20])}
            streams.append(bench.submit(prompts[len(streams)], **wish, **who))
            lone.extend(streams[-1:] if who["is_lone"] else [])
        elif len(streams) < N_REQUESTS and rng.random() < 0.2:
            wanted = rng.sample(prompts, rng.randint(1, 4))
            texts.append((bench.embed(wanted, **who), wanted))
            lone.extend([texts[-1][0]] if who["is_lone"] else [])
        if streams and rng.random() < 0.05:
            cancelled.add(rng.randrange(len(streams)))
            streams[max(cancelled)].cancel()
        if texts and rng.random() < 0.05:
            rng.choice(texts)[0].cancel()

    while len(streams) < N_REQUESTS:
        feed(0)
        bench.run(each_step=feed)
    for i, stream in enumerate(streams):
        told = list(stream)
        assert sum(isinstance(e, (Done, Error)) for e in told) == 1
        if isinstance(told[-1], Error):
            assert may_fail
            assert told[-1].message == "the fake engine fails here"
            continue
        choices, expected = collect(told).choices, truth(prompts[i])
        assert len(choices) == n_choices[i]
        for choice in choices:
            assert choice.ids == expected[: len(choice.ids)]
            assert choice.finish_reason != "stop" or choice.ids == expected
            assert choice.finish_reason != "cancelled" or cancelled
    for stream, wanted in texts:
        _check_vectors(list(stream), wanted)
    assert not any(bench.watch.between(stream.request_id) for stream in lone)
    _check_books(bench)


def _check_vectors(told: list[Event], texts: list[list[int]]) -> None:
    """What was embedded before the one end is right, and in order."""
    assert sum(isinstance(e, (Done, Error)) for e in told) == 1
    vectors = [e for e in told if isinstance(e, Embedded)]
    assert [e.index for e in vectors] == list(range(len(vectors)))
    for event, text in zip(vectors, texts, strict=False):
        assert event.vector == unit_bytes(fake_embedding(text))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("room_tokens", [80, 100, 120, 150, 180])
def test_an_engine_with_less_room_than_its_spec_still_comes_to_an_end(kind: str, room_tokens: int) -> None:
    engine = FakeEngine(replace(SPECS[kind], pool_tokens=300, n_slots=5), room_tokens=room_tokens)
    bench = Bench(engine)
    prompts = [[65 + i] * 60 for i in range(3)]
    streams = [bench.submit(p, max_tokens=30, ignore_eos=True) for p in prompts]
    bench.run(at_most=500)
    alone = Bench()
    for prompt, stream in zip(prompts, streams, strict=True):
        choice = collect(stream).choices[0]
        expected = alone.answer(prompt, max_tokens=30, ignore_eos=True).choices[0].ids
        assert choice.finish_reason == "length"
        assert choice.ids == expected[: len(choice.ids)]
        assert len(choice.ids) >= min(30, room_tokens - 60)


def _refuses(kind: type[Edit]) -> Callable[[Edit], bool]:
    return lambda edit: isinstance(edit, kind)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("edit", [CopyPrefix, Truncate, Rewind])
def test_an_edit_that_is_always_refused_costs_time_and_no_answer(kind: str, edit: type[Edit]) -> None:
    bench = Bench(FakeEngine(SPECS[kind], refuses=_refuses(edit)), drafter=HalfRight())
    prompt = list(b"one conversation, and its fork: ") * 2
    for prompts in ([prompt], [prompt], [[*prompt, 65], [*prompt, 66], [70] * 90]):
        streams = [bench.submit(p) for p in prompts]
        bench.run()
        assert [collect(s).choices[0].ids for s in streams] == [truth(p) for p in prompts]


def test_a_refused_rollback_is_recomputed_also_in_a_step_that_only_prefills() -> None:
    spec = replace(SPECS["prefill apart"], max_batch_tokens=16)
    bench = Bench(FakeEngine(spec, refuses=_refuses(Truncate)), drafter=HalfRight())
    first = bench.submit([65] * 20)
    for _ in range(3):
        bench.step()
    second = bench.submit([66] * 100)
    bench.run()
    assert collect(first).choices[0].ids == truth([65] * 20)
    assert collect(second).choices[0].ids == truth([66] * 100)


def test_a_refused_checkpoint_is_not_tried_again() -> None:
    bench = Bench(FakeEngine(SPECS["recurrent"], refuses=_refuses(Rewind)))
    for _ in range(3):
        assert bench.answer([65] * 40).choices[0].ids == truth([65] * 40)
    rewinds = [e for e in bench.engine.edits if isinstance(e, Rewind)]
    assert len({id(e.checkpoint) for e in rewinds}) == len(rewinds)


def test_edits_that_fail_clear_every_slot_they_named() -> None:
    """The edits after a failed one were never made: their slots hold what the ledger does not know."""
    bench = Bench(FakeEngine(replace(SPEC, n_slots=3)))
    for letter in (65, 66):
        bench.answer([letter] * 30)
    bench.engine._fail_edits = {len(bench.engine.edits) + 1}
    streams = [bench.submit([letter] * 30) for letter in (67, 68)]  # both evict: two edits, the first fails
    bench.run()
    assert all(isinstance(list(s)[-1], Error) for s in streams)
    for letter in (67, 68, 65):
        assert bench.answer([letter] * 30).choices[0].ids == truth([letter] * 30)
    _check_books(bench)


def test_a_plan_that_fails_fails_also_those_it_only_admitted() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=8), fail_forwards={1}))
    streams = [bench.submit([letter] * 30) for letter in (65, 66)]
    bench.step()
    assert [type(list(s)[-1]) for s in streams] == [Error, Error]
    assert bench.scheduler.is_idle


class Greedy:
    """A drafter that fills the whole batch, always right."""

    def propose(self, sequences: Sequence[Drafted], budget: int) -> list[Draft]:
        """Draft as many true tokens as were asked for, for each."""
        return [Draft(self._guess(list(s.tokens), budget)) for s in sequences]

    def accepted(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def forget(self, sequence: Drafted) -> None:
        """Keep nothing."""

    def _guess(self, tokens: list[int], n_tokens: int) -> tuple[int, ...]:
        return tuple([65] * n_tokens)


def test_drafts_leave_room_for_a_newcomer() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_batch_tokens=64)), drafter=Greedy())
    bench.submit([65] * 20, max_tokens=300, ignore_eos=True)
    for _ in range(3):
        bench.step()
    newcomer = bench.submit([66] * 200)
    bench.step()
    chunk = next(i for i in bench.engine.batches[-1].items if i.tokens[0] == 66)
    assert len(chunk.tokens) >= RuntimeConfig().min_chunk_tokens
    bench.run()
    assert collect(newcomer).choices[0].ids == truth([66] * 200)


def test_admission_is_told_before_anything_else_and_once() -> None:
    spec = replace(SPEC, pool_tokens=160, n_slots=5)
    bench = Bench(FakeEngine(spec, short_rooms={2, 3, 5, 8}))
    streams = [bench.submit([65 + i] * 40, max_tokens=40, ignore_eos=True) for i in range(4)]
    bench.run()
    for stream in streams:
        kinds = [type(e) for e in stream]
        assert kinds[1] is Admitted
        assert kinds.count(Admitted) == 1
