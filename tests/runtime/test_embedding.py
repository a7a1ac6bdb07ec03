"""Texts are embedded one after another on the spare slot, in chunks, and streams keep their pace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.errors import EngineError
from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.embedding import unit_bytes
from localllm.runtime.events import Admitted, Done, Embedded, Error, Event, Queued, Token, Usage
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.sequence import Phase
from localllm.runtime.stream import TokenStream, collect
from tests.fake_engine import SPEC, FakeEngine, fake_embedding
from tests.runtime.harness import SPECS, Bench, truth


def _told(stream: TokenStream) -> list[Event]:
    return list(stream)


def _vectors(events: list[Event]) -> list[np.ndarray]:
    return [np.frombuffer(e.vector, "<f4") for e in events if isinstance(e, Embedded)]


def _expected(text: list[int]) -> np.ndarray:
    vector = fake_embedding(text)
    return vector / np.linalg.norm(vector)


def _check(events: list[Event], texts: list[list[int]]) -> None:
    assert [e.index for e in events if isinstance(e, Embedded)] == list(range(len(texts)))
    for vector, text in zip(_vectors(events), texts, strict=True):
        assert vector == pytest.approx(_expected(text), abs=1e-6)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", SPECS)
def test_every_text_gets_its_vector_in_order(kind: str) -> None:
    bench, texts = Bench(FakeEngine(SPECS[kind])), [[65] * 5, [66] * 300, [67], [65] * 5]
    stream = bench.embed(texts)
    bench.run()
    events = _told(stream)
    assert [type(e) for e in events] == [Queued, Admitted, *[Embedded] * 4, Usage, Done]
    admitted, usage = events[1], events[-2]
    assert isinstance(admitted, Admitted)
    assert isinstance(usage, Usage)
    assert admitted.prompt_tokens == usage.prompt_tokens == 311
    assert usage.completion_tokens == 0
    _check(events, texts)
    assert max(len(chunk.tokens) for chunk in bench.engine.embeds) == SPEC.max_embed_rows
    assert bench.scheduler.stats.n_embedded_texts == 4
    assert bench.scheduler.stats.n_embedded_tokens == 311
    assert bench.scheduler.stats.used_cells == 0


@pytest.mark.parametrize("kind", SPECS)
def test_streams_beside_a_long_text_get_a_token_every_step(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]), RuntimeConfig(itl_target_s=1e-9))
    stream = bench.submit([65] * 20, ignore_eos=True, max_tokens=60)
    for _ in range(4):
        bench.step()
    text = bench.embed([[66] * 1000])
    while not any(isinstance(e, Done) for e in text._events):
        n_tokens = sum(isinstance(e, Token) for e in stream._events)
        bench.step()
        assert sum(isinstance(e, Token) for e in stream._events) == n_tokens + 1
    assert all(len(chunk.tokens) >= 8 for chunk in bench.engine.embeds[:-1])  # the floor
    assert bench.scheduler.stats.n_floor_chunks >= 15
    _check(_told(text), [[66] * 1000])


def test_a_chunk_takes_what_is_left_of_the_target_after_the_step() -> None:
    bench = Bench(FakeEngine(replace(SPEC, max_embed_rows=1024)), RuntimeConfig(itl_target_s=0.2, min_chunk_tokens=1))
    seat = bench.scheduler._embeds
    for n_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        seat._cost.observe(n_rows, 0, n_rows * 0.001)
    assert seat._rows(0, 0.0) == 1024  # 2 s when nobody decodes
    assert seat._rows(1, 0.0) == 128
    assert seat._rows(1, 0.1) == 64
    assert bench.scheduler.stats.n_floor_chunks == 0
    assert seat._rows(1, 0.3) == 64  # the target is gone: a quarter of the step
    assert bench.scheduler.stats.n_floor_chunks == 1


def test_clients_take_turns_text_by_text() -> None:
    bench = Bench()
    many = bench.embed([[65 + i] * 10 for i in range(20)], client="many")
    bench.step()
    one = bench.embed([[90] * 10], client="one")
    for _ in range(3):
        bench.step()
    assert isinstance(one._events[-1], Done)
    assert sum(isinstance(e, Embedded) for e in many._events) < 5
    bench.run()
    _check(_told(many), [[65 + i] * 10 for i in range(20)])


def test_texts_wait_for_cells_and_long_ones_find_them() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=300)))
    stream = bench.submit([65] * 60, ignore_eos=True, max_tokens=100)
    for _ in range(5):
        bench.step()
    text = bench.embed([[66] * 280])
    for _ in range(20):
        bench.step()
    assert bench.engine.embeds == []
    bench.run()
    _check(_told(text), [[66] * 280])
    assert collect(stream).choices[0].finish_reason == "length"


def test_a_text_gives_way_to_streams_that_need_its_cells_and_begins_anew() -> None:
    engine = FakeEngine(replace(SPEC, pool_tokens=300, max_embed_rows=1))
    bench = Bench(engine)
    streams = [bench.submit([65 + i] * 40, client=f"c{i}", ignore_eos=True, max_tokens=80) for i in range(2)]
    for _ in range(5):
        bench.step()
    text = bench.embed([[70] * 180])
    bench.run()
    assert bench.scheduler.stats.n_preemptions == 1
    _check(_told(text), [[70] * 180])
    assert [c.start for c in engine.embeds].count(0) == 2
    for i, stream in enumerate(streams):
        choice = collect(stream).choices[0]
        assert choice.finish_reason == "length"
        assert len(choice.ids) == 80, i


def test_a_lone_stream_that_needs_cells_takes_a_texts_not_its_own_end() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=200, max_embed_rows=1)))
    stream = bench.submit([65] * 40, ignore_eos=True, max_tokens=140)
    for _ in range(5):
        bench.step()
    text = bench.embed([[70] * 120])
    bench.run()
    assert len(collect(stream).choices[0].ids) == 140
    _check(_told(text), [[70] * 120])


@pytest.mark.parametrize("when", ["queued", "admitted", "between texts", "within a text"])
def test_a_cancel_ends_texts_within_a_chunk(when: str) -> None:
    bench = Bench()
    first = bench.embed([[90] * 64 * 3]) if when == "queued" else None
    stream = bench.embed([[65] * 10, [66] * 200, [67] * 10])
    for _ in range({"queued": 1, "admitted": 0, "between texts": 1, "within a text": 3}[when]):
        bench.step()
    n_chunks = len(bench.engine.embeds)
    stream.cancel()
    bench.step()
    events = _told(stream)
    assert isinstance(events[-1], Done)
    assert isinstance(events[-2], Usage)
    assert len(_vectors(events)) == {"queued": 0, "admitted": 0, "between texts": 1, "within a text": 1}[when]
    assert len(bench.engine.embeds) <= n_chunks + (1 if first else 0)
    bench.run()
    assert bench.scheduler.stats.used_cells == 0
    later = bench.embed([[80] * 70])
    bench.run()
    _check(_told(later), [[80] * 70])
    if first is not None:
        _check(_told(first), [[90] * 64 * 3])


def test_a_chunk_that_fails_fails_its_request_alone_and_leaves_a_clean_slot() -> None:
    bench = Bench(FakeEngine(fail_embeds={2}))
    stream = bench.submit([65] * 20)
    bad, good = bench.embed([[66] * 100], client="a"), bench.embed([[67] * 100], client="b")
    bench.run()
    told = _told(bad)[-1]
    assert isinstance(told, Error)
    assert told.code == "engine_error"
    _check(_told(good), [[67] * 100])
    assert collect(stream).choices[0].ids == truth([65] * 20)


def test_edits_that_fail_do_not_let_a_text_begin_on_a_dirty_slot() -> None:
    bench = Bench(FakeEngine(fail_edits={1}))
    cancelled = bench.embed([[65] * 200])
    bench.step()
    cancelled.cancel()  # its Clear is the edit that fails
    text = bench.embed([[66] * 100])
    bench.run()
    _check(_told(text), [[66] * 100])


@pytest.mark.parametrize("short", [{1}, {2}, {1, 2, 3}])
def test_an_engine_without_room_for_a_chunk_gets_it_again_after_an_eviction(short: set[int]) -> None:
    bench = Bench(FakeEngine(short_embeds=short))
    for letter in (65, 66, 67):
        bench.answer([letter] * 30)
    text = bench.embed([[70] * 100])
    bench.run()
    _check(_told(text), [[70] * 100])
    assert bench.scheduler.stats.n_evictions == len(short)


def test_an_engine_with_less_room_than_it_says_defers_a_text_until_someone_left_or_refuses_it() -> None:
    bench = Bench(FakeEngine(replace(SPEC, pool_tokens=400), room_tokens=150))
    stream = bench.submit([65] * 40, ignore_eos=True, max_tokens=60)
    for _ in range(3):
        bench.step()
    fits, never = bench.embed([[66] * 120]), bench.embed([[67] * 160])
    bench.run()
    assert len(collect(stream).choices[0].ids) == 60
    _check(_told(fits), [[66] * 120])
    told = _told(never)[-1]
    assert isinstance(told, Error)
    assert told.code == "context_length_exceeded"


def test_a_vector_that_is_not_numbers_fails_its_request() -> None:
    class Nan(FakeEngine):
        def embed(self, chunk: object) -> object:  # type: ignore[override]
            vector = super().embed(chunk)  # type: ignore[arg-type]
            if vector is not None and chunk.tokens[0] == 66:  # type: ignore[attr-defined]
                vector[3] = np.nan
            return vector

    bench = Bench(Nan())
    bad, good = bench.embed([[66] * 10, [67] * 10]), bench.embed([[68] * 10])
    bench.run()
    assert isinstance(_told(bad)[-1], Error)
    _check(_told(good), [[68] * 10])


def test_vectors_have_length_one_whatever_their_scale() -> None:
    for scale in (1e-30, 1.0, 1e30):
        vector = np.frombuffer(unit_bytes(np.array([3, 4], np.float32) * np.float32(scale)), "<f4")
        assert vector == pytest.approx([0.6, 0.8], abs=1e-6)
    assert np.frombuffer(unit_bytes(np.zeros(2, np.float32)), "<f4").tolist() == [0, 0]
    with pytest.raises(EngineError):
        unit_bytes(np.array([np.inf, 0], np.float32))


def test_a_watch_sees_the_chunks_with_what_they_should_take() -> None:
    bench = Bench()
    stream = bench.embed([[65] * 200])
    bench.run()
    assert bench.watch.steps.count((stream.request_id,)) == 4
    assert bench.watch.expected_s[0] is None
    assert bench.watch.expected_s[-1] is not None


@pytest.mark.parametrize("kind", SPECS)
def test_a_text_gets_its_turn_however_many_come_whose_prefixes_are_put_back(kind: str) -> None:
    """Four clients with prompts that RAM knows, a new one as soon as one is answered: somebody always restores."""
    spec = replace(SPECS[kind], max_sequence_tokens=600)
    tiers = Tiers(TierConfig(ram_bytes=1 << 24, block_tokens=16), spec=spec)
    prompts = [[33 + n % 90, 33 + n // 90] * 100 for n in range(120)]
    for prompt in prompts:
        Bench(FakeEngine(spec), tiers=tiers).answer(prompt, max_tokens=1)
    bench = Bench(FakeEngine(spec), tiers=tiers)
    bench.cost.restore_s = lambda n_tokens: 0.05 * n_tokens  # type: ignore[method-assign]
    bench.submit([32] * 10, client="stream", ignore_eos=True, max_tokens=500)
    coming, agents = iter(prompts), dict[int, TokenStream]()
    text, n_restoring, n_steps = None, 0, 0
    while text is None or not text._ended:
        for agent in range(4):
            if agent not in agents or agents[agent]._ended:
                agents[agent] = bench.submit([*next(coming), 126], client=str(agent), max_tokens=1 + agent)
        bench.step()
        n_steps += 1
        n_restoring += any(s.phase is Phase.RESTORING for s in bench.scheduler._running)
        if n_steps == 5:
            text = bench.embed([[66] * 40], client="texts")
        assert n_steps < 80
    assert n_restoring > 1
    _check(_told(text), [[66] * 40])
    bench.run()
    assert bench.scheduler.stats.n_restored_blocks > 0


@pytest.mark.parametrize("kind", ["any", "recurrent"])
def test_what_must_go_for_a_text_is_kept_in_a_tier_first(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=300)
    tiers = Tiers(TierConfig(ram_bytes=1 << 24, block_tokens=16), spec=spec)
    bench, prompt = Bench(FakeEngine(spec), tiers=tiers), [65] * 100
    bench.scheduler.exports.budget.allows = lambda *, debt, pledged_s=0.0: debt  # type: ignore[method-assign]
    stream = bench.submit(prompt, max_tokens=20, ignore_eos=True)
    bench.step()
    text = bench.embed([[66] * 260])
    bench.run()
    _check(_told(text), [[66] * 260])
    answer = collect(stream).choices[0].ids
    assert bench.scheduler.stats.n_retained_slots == 0  # the control: it had to go
    turn = [*prompt, *answer, 33]
    again = bench.answer(turn, max_tokens=2)
    assert again.choices[0].ids == truth(turn, 2)
    assert again.usage.cached_tokens["ram"] == 119
