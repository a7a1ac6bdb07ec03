"""What slots hold reaches the tiers before it is lost, and nobody who streams waits for it."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from localllm.errors import Unavailable
from localllm.runtime.config import TierConfig
from localllm.runtime.engine import CopyPrefix, Edit, EngineSpec, Rewind, Truncate
from localllm.runtime.events import Embedded
from localllm.runtime.inbox import Close
from localllm.runtime.kv.tiers import CutRule, Tiers
from localllm.runtime.sequence import Sequence
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import SPEC, FakeEngine, fake_service
from tests.runtime.harness import SPECS, Bench, HalfRight, truth

RAM = TierConfig(ram_bytes=1 << 24, block_tokens=16)


class Slow(FakeEngine):
    """Each export takes its time."""

    def __init__(self, spec: EngineSpec = SPEC, *, export_s: float = 0.0, **knobs: object) -> None:
        super().__init__(spec, **knobs)  # type: ignore[arg-type]
        self.export_s = export_s
        self.n_exports = 0

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Take the time, then export."""
        self.n_exports += 1
        time.sleep(self.export_s)
        return super().export(slot, start, end)


def _bench(spec: EngineSpec = SPEC, config: TierConfig = RAM, engine: FakeEngine | None = None) -> Bench:
    return Bench(engine or FakeEngine(spec), tiers=Tiers(config, spec=spec))


def _prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n)]


def _streaming(bench: Bench, n_prompt: int = 10) -> object:
    """Have a sequence decode that does not end soon."""
    stream = bench.submit(_prompt(99, n_prompt), max_tokens=2000, ignore_eos=True, client="streams")
    while not bench.scheduler.decoding:
        bench.step()
    return stream


def test_beside_a_stream_a_step_exports_one_block_at_most() -> None:
    bench = _bench(engine=Slow())
    bench.scheduler.exports.budget.allows = lambda **_: True  # type: ignore[method-assign]
    _streaming(bench)
    bench.submit(_prompt(1, 200), max_tokens=2)
    engine = bench.engine
    assert isinstance(engine, Slow)
    for _ in range(40):
        n_before = engine.n_exports
        bench.step()
        assert engine.n_exports - n_before <= 1
    assert engine.n_exports >= 12


def test_beside_a_stream_exports_take_a_twentieth_of_the_time() -> None:
    engine = Slow(export_s=0.002, on_forward=lambda batch: time.sleep(0.002))
    bench = _bench(engine=engine)
    _streaming(bench)
    done = bench.submit(_prompt(1, 2000), max_tokens=2)
    while not done._ended:
        bench.step()
    n_before, started_s = engine.n_exports, time.perf_counter()
    for _ in range(100):
        bench.step()
    elapsed_s = time.perf_counter() - started_s
    assert 0 < (engine.n_exports - n_before) * 0.002 < 0.05 * elapsed_s + 0.03


def test_an_idle_loop_exports_all_then_sleeps() -> None:
    with fake_service(FakeEngine()) as service:
        collect(service.submit(CompletionRequest(tuple(_prompt(2, 300)), GenerationOptions(max_tokens=3))))
        deadline_s = time.monotonic() + 5
        while service._scheduler.exports.has_work:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        time.sleep(0.02)
        cpu_before_s = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - cpu_before_s < 0.08
        assert service.stats().n_exported_blocks == 5


def test_a_message_waits_for_one_block_at_most_while_an_idle_loop_exports() -> None:
    engine = Slow(export_s=0.02)
    with fake_service(engine) as service:
        collect(service.submit(CompletionRequest(tuple(_prompt(2, 3000)), GenerationOptions(max_tokens=3))))
        started_s, answered = time.monotonic(), list[float]()
        service.ping(lambda: answered.append(time.monotonic()))
        while not answered:
            assert time.monotonic() - started_s < 5
            time.sleep(0.001)
        assert answered[0] - started_s < 0.5
        assert service._scheduler.exports.has_work  # the control: there was more to do than that


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_evicted_for_room_is_exported_first(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=260, n_slots=3)
    bench = _bench(spec)
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
    bench.scheduler._room.trim = lambda *_: None  # type: ignore[method-assign]
    first, second = _prompt(3, 150), _prompt(4, 150)
    bench.answer(first, max_tokens=2)
    bench.answer(second, max_tokens=2)
    assert bench.scheduler.stats.n_evictions >= 1
    again = bench.answer(first, max_tokens=2)
    assert again.choices[0].ids == truth(first, 2)
    assert again.usage.cached_tokens.get("ram", 0) > 100


@pytest.mark.parametrize("kind", SPECS)
def test_eviction_exports_no_more_than_the_debt_allows(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=260, n_slots=3)
    bench = _bench(spec)
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
    bench.scheduler.exports.due = lambda busy: iter(())  # type: ignore[method-assign]
    bench.answer(_prompt(3, 150), max_tokens=2)
    bench.scheduler.exports.budget.spend(10.0)
    bench.answer(_prompt(4, 150), max_tokens=2)
    assert bench.engine.n_exported == 0


def test_a_shorter_take_over_keeps_the_rest_in_a_tier() -> None:
    spec = replace(SPEC, n_slots=2)
    bench = _bench(spec)
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
    long = _prompt(5, 150)
    bench.answer(long, max_tokens=2)
    bench.answer([*long[:20], 33, 34], max_tokens=2)
    assert any(isinstance(edit, Truncate) for edit in bench.engine.edits)
    again = bench.answer(long, max_tokens=2)
    assert again.usage.cached_tokens["ram"] + again.usage.cached_tokens["device"] == 149


def test_a_slot_whose_blocks_the_ram_tier_has_dropped_stays_on_the_device() -> None:
    bench = _bench(config=replace(RAM, ram_bytes=200))
    prompts = [_prompt(10 + i, 500) for i in range(4)]
    for prompt in prompts:
        bench.answer(prompt, max_tokens=2)
    stream = bench.submit(_prompt(20, 300), max_tokens=5)
    bench.run()
    assert collect(stream).choices[0].ids == truth(_prompt(20, 300), 5)
    for prompt in prompts:
        assert bench.answer(prompt, max_tokens=2).usage.cached_tokens == {"device": 499}


def test_a_long_prefill_has_what_slows_it_exported_and_then_cleared() -> None:
    bench = _bench()
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
    bench.answer(_prompt(6, 900), max_tokens=2)
    bench.cost.estimate_s = lambda n_rows, used_cells: n_rows * 0.001  # type: ignore[method-assign]
    bench.submit(_prompt(7, 600), max_tokens=2)
    bench.step()
    assert bench.engine.n_exported == 901
    assert bench.scheduler.stats.retained_cells == 901  # until a tier has it
    bench.step()
    assert bench.scheduler.stats.retained_cells == 0
    bench.run()
    assert bench.answer(_prompt(6, 900), max_tokens=2).usage.cached_tokens["ram"] == 899


def test_a_short_prefill_or_a_stream_does_not_wait_for_exports() -> None:
    for streams in (False, True):
        bench = _bench()
        bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
        bench.answer(_prompt(6, 900), max_tokens=2)
        if streams:
            _streaming(bench)
        bench.submit(_prompt(7, 600 if streams else 100), max_tokens=2)
        bench.step()
        assert bench.engine.n_exported == 0
        assert bench.scheduler.stats.retained_cells > 800


def test_cells_shared_with_those_at_work_stay() -> None:
    bench = _bench()
    shared = _prompt(8, 900)
    bench.answer(shared, max_tokens=2)
    bench.submit([*shared, 40, 41], max_tokens=400, ignore_eos=True)
    bench.step()
    assert bench.answer_beside([*shared, 50], max_tokens=2).usage.cached_tokens["device"] == 900


@pytest.mark.parametrize("kind", SPECS)
def test_own_memory_and_windows_are_exported_while_a_sequence_runs(kind: str) -> None:
    bench = _bench(SPECS[kind])
    bench.scheduler.exports.budget.allows = lambda **_: True  # type: ignore[method-assign]
    _streaming(bench, n_prompt=100)
    for _ in range(40):
        bench.step()
    assert (bench.engine.n_exported > 0) == (kind in ("window", "own memory"))


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_pinned_is_exported_at_once_beside_streams(kind: str) -> None:
    bench = _bench(SPECS[kind])
    bench.scheduler.exports.budget.allows = lambda **_: False  # type: ignore[method-assign]
    _streaming(bench)
    prompt = _prompt(9, 100)
    pinned = bench.submit(prompt, max_tokens=1, cache="pin")
    while not pinned._ended:
        bench.step()
    assert bench.engine.n_exported >= 96
    entries = [entry for entry in bench.tiers._ram if entry.note.is_pinned]
    assert sum(entry.block.n_tokens for entry in entries) >= 96


@pytest.mark.parametrize("kind", SPECS)
def test_what_was_to_be_pinned_and_broke_off_is_not(kind: str) -> None:
    bench, prompt = _bench(SPECS[kind]), _prompt(9, 400)
    broken = bench.submit(prompt, max_tokens=1, cache="pin")
    bench.step()
    assert 64 <= bench.scheduler._running[0].n_computed < 400
    bench.scheduler.cancel(broken)
    while not bench.scheduler.is_idle or bench.scheduler.exports.has_work:
        bench.step()
    assert len(bench.tiers._ram) > 0
    assert not [entry for entry in bench.tiers._ram if entry.note.is_pinned]
    bench.submit(prompt, max_tokens=1, cache="pin")
    bench.run()
    assert sum(entry.block.n_tokens for entry in bench.tiers._ram if entry.note.is_pinned) >= 384


@pytest.mark.parametrize("kind", ["any", "window", "own memory"])
def test_what_ram_holds_is_pinned_without_exporting_it_again(kind: str) -> None:
    bench, prompt = _bench(SPECS[kind]), _prompt(9, 400)
    bench.scheduler.exports.budget.allows = lambda **_: True  # type: ignore[method-assign]
    for _ in range(2):
        bench.submit(prompt, max_tokens=1, cache="pin")
        bench.run()
    assert sum(entry.block.n_tokens for entry in bench.tiers._ram if entry.note.is_pinned) >= 384
    assert bench.engine.n_exported <= 416


def test_a_text_that_is_embedded_has_the_spare_slot_to_itself() -> None:
    """The fake engine breaks where a block is exported through a slot that is in use."""
    spec = replace(SPEC, max_embed_rows=4, pool_tokens=700)
    tiers = Tiers(RAM, spec=spec)
    Bench(FakeEngine(spec), tiers=tiers).answer(_prompt(6, 200), max_tokens=2)
    for seed in range(4):
        bench = Bench(FakeEngine(spec), tiers=tiers)
        bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
        bench.answer(_prompt(60 + seed, 200), max_tokens=2)
        bench.answer(_prompt(70 + seed, 200), max_tokens=2)
        vectors = bench.embed([_prompt(30 + seed, 200)], client="embeds")
        bench.step()
        assert bench.engine.slots[-1].tokens
        streams = [bench.submit(_prompt(40 + seed, 250), max_tokens=8), bench.submit(_prompt(6, 200), max_tokens=2)]
        bench.run()
        assert collect(streams[0]).choices[0].ids == truth(_prompt(40 + seed, 250), 8)
        assert collect(streams[1]).choices[0].ids == truth(_prompt(6, 200), 2)
        assert any(isinstance(event, Embedded) for event in vectors)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "everything hard"])
@pytest.mark.parametrize("edit", [CopyPrefix, Rewind])
def test_a_checkpoint_that_cannot_be_copied_out_is_not_kept_and_nothing_breaks(kind: str, edit: type[Edit]) -> None:
    spec = SPECS[kind]
    bench = _bench(spec, engine=FakeEngine(spec, refuses=lambda e: isinstance(e, edit)))
    prompt = _prompt(11, 80)
    for _ in range(3):
        assert bench.answer(prompt, max_tokens=4).choices[0].ids == truth(prompt, 4)
    assert not bench.engine.slots[-1].tokens


@pytest.mark.parametrize("kind", SPECS)
def test_an_export_that_fails_costs_the_block_and_nobody(kind: str) -> None:
    class Failing(FakeEngine):
        def export(self, slot: int, start: int, end: int) -> bytes:
            raise RuntimeError("native code failed")

    spec = SPECS[kind]
    bench = _bench(spec, engine=Failing(spec))
    prompt = _prompt(12, 100)
    for _ in range(2):
        assert bench.answer(prompt, max_tokens=4).choices[0].ids == truth(prompt, 4)
    assert len(bench.tiers._ram) == 0


def test_the_tiers_of_a_closed_model_hold_what_was_not_yet_exported(tmp_path: object) -> None:
    config = replace(RAM, disk_dir=f"{tmp_path}/kv", disk_bytes=1 << 24, keeps_all=True)
    tiers = Tiers(config, spec=SPEC, can_write_disk=True)
    bench = Bench(FakeEngine(), tiers=tiers)
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]
    prompt = _prompt(13, 100)
    bench.answer(prompt, max_tokens=2)
    del bench.scheduler.exports.next
    bench.loop._closing = True
    bench.loop._run()
    after = Bench(FakeEngine(), tiers=Tiers(config, spec=SPEC, can_write_disk=True))
    assert after.answer(prompt, max_tokens=2).usage.cached_tokens == {"device": 0, "disk": 99}
    after.tiers.close()


def test_the_pool_is_full_when_somebody_is_preempted_first() -> None:
    for rule in (SPEC, SPECS["window"], SPECS["recurrent"]):
        bench = _bench(replace(rule, pool_tokens=1000))
        for i in range(6):
            bench.submit(_prompt(50 + i, 60), max_tokens=300, ignore_eos=True)
        used = 0
        while not bench.scheduler.stats.n_preemptions:
            used = bench.scheduler.stats.used_cells
            bench.step()
        assert used >= 960
        bench.run()


def test_a_slot_whose_window_no_block_could_bring_back_stays() -> None:
    """A block that a window has left before it was complete is of use only a whole window further on."""
    for kind, stays in (("window", True), ("any", False)):
        spec = replace(SPECS[kind], window_tokens=8 if stays else 0)
        bench = _bench(spec)
        bench.answer(_prompt(14, 600), max_tokens=40, ignore_eos=True)
        bench.submit(_prompt(15, 50), max_tokens=2)
        bench.step()
        assert (bench.scheduler.stats.retained_cells > 600) == stays
        bench.run()


def test_what_the_engine_does_not_hold_yet_is_never_exported() -> None:
    """A slot that was filled, given up and evicted in one plan holds nothing for the engine."""
    bench, tokens = _bench(), _prompt(16, 100)
    bench.answer(tokens, max_tokens=2)
    room = bench.scheduler._room
    bench.submit([*tokens[:60], 33, 34])
    for message in bench.loop.inbox.receive(0):
        bench.loop._apply(message)
    (sequence,) = bench.scheduler._admission.admit(bench.scheduler._running)
    assert sequence.n_computed == 60
    copied = sequence.slot
    room.retire(sequence)
    assert copied is not None
    bench.scheduler.exports._sources[copied.id].note = replace(
        bench.scheduler.exports._sources[copied.id].note, is_pinned=True
    )
    while room.evict_one():
        pass
    assert not [job for job in bench.scheduler.exports.take_rescued() if job.slot == copied.id]


def _sleepy(bench: Bench) -> None:
    """Have nothing exported but what cannot wait and what is rescued."""
    bench.scheduler.exports.next = lambda *_, **__: None  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", SPECS)
def test_what_a_tier_has_lost_again_is_exported_anew_before_it_is_evicted(kind: str) -> None:
    bench = _bench(replace(SPECS[kind], pool_tokens=260, n_slots=3))
    first, second = _prompt(3, 150), _prompt(4, 150)
    bench.scheduler._room.trim = lambda *_: None  # type: ignore[method-assign]
    bench.answer(first, max_tokens=2)
    bench.step()
    assert not bench.scheduler.exports.has_work
    bench.tiers.clear_ram()
    bench.answer(second, max_tokens=2)
    assert bench.scheduler.stats.n_evictions >= 1
    again = bench.answer(first, max_tokens=2)
    assert again.choices[0].ids == truth(first, 2)
    if kind not in ("window", "everything hard"):  # most of a window's cells are gone; a copy costs cells
        assert again.usage.cached_tokens.get("ram", 0) > 100


def test_a_slot_is_safe_again_once_what_a_tier_lost_was_exported_anew() -> None:
    bench = _bench()
    bench.answer(_prompt(6, 900), max_tokens=2)
    bench.step()
    (slot,) = bench.scheduler._room.slots.retained()
    exports = bench.scheduler.exports
    assert exports.is_safe(slot)
    bench.tiers.clear_ram()
    assert not exports.is_safe(slot)
    assert exports.rescue(slot)
    bench.loop._exporter.rescue()
    while exports.has_work:
        bench.step()
    assert exports.is_safe(slot)
    assert not exports.rescue(slot)


def test_a_slot_is_safe_whose_last_block_is_but_the_beginning_of_another() -> None:
    bench = _bench()
    bench.answer(_prompt(6, 100), max_tokens=2)
    bench.step()
    (slot,) = bench.scheduler._room.slots.retained()
    source, n_blocks = bench.scheduler.exports._sources[slot.id], len(bench.tiers._ram)
    tokens = [*source.tokens, *_prompt(7, 20)]
    block = bench.tiers.blank(source.sequence.run.root).chain.block(tokens, 96, 112)
    bench.tiers.put(block, b"as long", source.note)
    assert len(bench.tiers._ram) == n_blocks  # it is there instead of the slot's last one
    assert bench.scheduler.exports.is_safe(slot)


def test_a_failed_export_is_no_kept_one_and_is_tried_again() -> None:
    class Fails(FakeEngine):
        n_left = 1

        def export(self, slot: int, start: int, end: int) -> bytes:
            if start == 32 and self.n_left:
                self.n_left -= 1
                raise RuntimeError("native code failed")
            return super().export(slot, start, end)

    bench = _bench(engine=Fails())
    bench.answer(_prompt(12, 100), max_tokens=2)
    bench.step()
    exports = bench.scheduler.exports
    (slot,) = bench.scheduler._room.slots.retained()
    assert not exports.has_work  # it does not spin
    assert not exports.is_safe(slot)
    assert bench.engine.n_exported == 32  # nothing that would be of no use alone
    assert exports.rescue(slot)
    bench.loop._exporter.rescue()
    assert exports.is_safe(slot)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "everything hard"])
def test_a_state_is_safe_only_with_its_checkpoints(kind: str) -> None:
    """Without them an exact repeat is computed again."""
    bench = _bench(SPECS[kind])
    prompt = _prompt(40, 400)
    exports = bench.scheduler.exports
    export_next, exports.next = exports.next, lambda *_, **__: None  # type: ignore[method-assign]
    bench.answer(prompt, max_tokens=5)
    job = export_next(frozenset(), is_quiet=True)
    assert job is not None
    bench.loop._exporter._keep(job)
    bench.answer(_prompt(41, 300), max_tokens=2)
    assert sum(bench.answer(prompt, max_tokens=2).usage.cached_tokens.values()) == 399


def test_checkpoints_are_kept_of_a_state_of_which_the_pool_has_no_room_for_a_copy() -> None:
    """Documents that take turns were computed again for each question."""
    spec = replace(SPECS["everything hard"], pool_tokens=600)
    bench, documents = _bench(spec), [_prompt(42, 400), _prompt(43, 400)]
    n_computed = list[int]()
    for i in range(10):
        prompt, n_before = [*documents[i % 2], *_prompt(50 + i, 9)], bench.scheduler.stats.n_prompt_tokens_computed
        assert bench.answer(prompt, max_tokens=5).choices[0].ids == truth(prompt, 5)
        n_computed.append(bench.scheduler.stats.n_prompt_tokens_computed - n_before)
        while bench.scheduler.exports.has_work:
            bench.step()
    assert n_computed[4:] == [9] * 6  # the second question about each finds out where they part


def test_checkpoints_are_kept_of_a_state_whose_last_draft_was_rejected() -> None:
    n_settling = 0
    for seed in range(8):
        bench = Bench(FakeEngine(SPECS["hybrid"]), drafter=HalfRight(), tiers=Tiers(RAM, spec=SPECS["hybrid"]))
        prompt = _prompt(44 + seed, 200)
        bench.answer(prompt, max_tokens=500)
        bench.step()
        bench.step()
        (slot,) = bench.scheduler._room.slots.retained()
        n_settling += slot.is_settling
        bench.scheduler._room.evict_one()
        bench.step()
        assert bench.answer(prompt, max_tokens=5).usage.cached_tokens.get("ram", 0) == 199
    assert n_settling > 2  # the control


def test_what_is_copied_in_the_step_of_its_eviction_is_copied_as_it_was() -> None:
    bench, prompt = _bench(replace(SPECS["hybrid"], n_slots=4)), _prompt(52, 200)
    _sleepy(bench)
    bench.answer(prompt, max_tokens=30, ignore_eos=True)
    bench.step()
    (slot,) = bench.scheduler._room.slots.retained()
    stream = bench.submit([*prompt, 33, 34], max_tokens=5)
    seat, n_seated = bench.scheduler._room.seat, list[int]()

    def seat_and_evict(sequence: Sequence) -> bool:
        n_seated.append(seat(sequence))
        bench.scheduler._room.evict_one()
        return True

    bench.scheduler._room.seat = seat_and_evict  # type: ignore[method-assign]
    bench.run()
    assert n_seated == [True]
    assert not bench.scheduler._room.slots.is_retained(slot)
    assert collect(stream).choices[0].ids == truth([*prompt, 33, 34], 5)


def test_a_window_is_safe_only_with_all_of_its_last_blocks() -> None:
    """One good block after bare ones is not enough where the window is longer than a block."""
    bench = _bench(SPECS["window"])
    _sleepy(bench)
    bench.answer(_prompt(14, 200), max_tokens=24, ignore_eos=True)
    (slot,) = bench.scheduler._room.slots.retained()
    exports = bench.scheduler.exports
    assert slot.first_held > 0
    bench.tiers.clear_ram()
    exports.cleared()
    slot.first_held = slot.n_held - 5  # as where blocks that were put back left gaps
    assert exports.rescue(slot)
    bench.loop._exporter.rescue()
    assert not exports.is_safe(slot)


def test_beside_a_stream_a_window_that_the_tiers_lost_is_not_exported_from_its_beginning_at_once() -> None:
    engine = Slow(SPECS["window"])
    bench = _bench(engine=engine)
    prompt = _prompt(15, 900)
    told = bench.answer(prompt, max_tokens=2)
    bench.step()
    bench.tiers.clear_ram()
    _streaming(bench)
    bench.scheduler.exports.budget.allows = lambda **_: False  # type: ignore[method-assign]
    turn = [*prompt, *told.choices[0].ids, 40, 41]
    n_before, stream = engine.n_exports, bench.submit(turn, max_tokens=2)
    while not stream._ended:
        bench.step()
    assert collect(stream).usage.cached_tokens["device"] >= 900
    assert 0 < engine.n_exports - n_before <= 4
    assert not any(entry.block.is_bare for entry in bench.tiers._ram)


def test_nothing_is_exported_through_a_spare_slot_that_the_engine_still_holds_a_text_on() -> None:
    spec = replace(SPEC, max_embed_rows=4)
    bench = _bench(spec)
    _sleepy(bench)
    bench.answer(_prompt(6, 100), max_tokens=2)
    text = bench.embed([_prompt(30, 200)])
    bench.step()
    assert not bench.scheduler.may_export
    text.cancel()
    for message in bench.loop.inbox.receive(0):
        bench.loop._apply(message)
    assert not bench.scheduler._room.has_text
    assert not bench.scheduler.may_export
    bench.step()
    assert bench.scheduler.may_export


def test_a_closed_model_keeps_what_those_at_work_had_computed(tmp_path: object) -> None:
    config = replace(RAM, disk_dir=f"{tmp_path}/kv", disk_bytes=1 << 24, keeps_all=True)
    for kind in ("any", "window", "recurrent"):
        bench = Bench(FakeEngine(SPECS[kind]), tiers=Tiers(config, spec=SPECS[kind], can_write_disk=True))
        prompt = _prompt(13, 100)
        stream = bench.submit(prompt, max_tokens=100, ignore_eos=True)
        while not bench.scheduler.decoding:
            bench.step()
        bench.loop.inbox.put(Close())
        bench.loop._run()
        with pytest.raises(Unavailable):
            collect(stream)
        after = Bench(FakeEngine(SPECS[kind]), tiers=Tiers(config, spec=SPECS[kind], can_write_disk=True))
        turn = [*prompt, truth(prompt, 1)[0], 40]
        assert after.answer(turn, max_tokens=2).usage.cached_tokens.get("disk", 0) >= 100, kind
        after.tiers.close()


def test_a_model_that_falls_asleep_has_told_the_engine_all() -> None:
    engine = FakeEngine()
    with fake_service(engine) as service:
        options = GenerationOptions(max_tokens=3, cache="off")
        collect(service.submit(CompletionRequest(tuple(_prompt(2, 300)), options)))
        deadline_s = time.monotonic() + 5
        while any(slot.tokens for slot in engine.slots):
            assert time.monotonic() < deadline_s
            time.sleep(0.005)


def test_the_rule_of_every_spec_is_tested() -> None:
    assert {Tiers(RAM, spec=spec).rule for spec in SPECS.values()} == set(CutRule)
