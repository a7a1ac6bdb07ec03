"""Known prefixes come back a part a step, from wherever they lie; what cannot be had is computed."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.engine import EditOutcome, EditResult, EngineSpec, ExportUnit, PrefixRule, Restore
from localllm.runtime.events import Admitted, Event
from localllm.runtime.kv import restores
from localllm.runtime.kv.blocks import Block
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.sequence import Phase
from localllm.runtime.stream import collect
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import SPECS, Bench, truth

RAM = TierConfig(ram_bytes=1 << 24, block_tokens=16)


def _prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n)]


def _known(prompt: list[int], spec: EngineSpec = SPEC, config: TierConfig = RAM) -> Tiers:
    """Return tiers that know a prompt."""
    tiers = Tiers(config, spec=spec, can_write_disk=True)
    before = Bench(FakeEngine(spec), tiers=tiers)
    before.answer(prompt, max_tokens=2)
    return tiers


def _on_disk(prompt: list[int], tmp_path: Path, spec: EngineSpec = SPEC) -> TierConfig:
    config = replace(RAM, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 24, keeps_all=True)
    _known(prompt, spec, config).close()
    return config


def _restored(bench: Bench) -> int:
    return sum(isinstance(edit, Restore) for edit in bench.engine.edits)


def test_beside_a_stream_a_step_puts_back_what_a_fifth_of_it_allows_and_always_a_block() -> None:
    for per_token_s, n_most in ((1e-9, 100), (0.1 * 0.2 / 16 / 3, 4), (5.0, 1)):
        prompt = _prompt(1, 400)
        bench = Bench(FakeEngine(), tiers=_known(prompt))
        bench.submit(_prompt(2, 10), max_tokens=300, ignore_eos=True, client="other")
        bench.step()
        bench.cost.estimate_s = lambda n_rows, used_cells: 0.1  # type: ignore[method-assign]
        bench.cost.restore_s = lambda n_tokens, each_s=per_token_s: each_s * n_tokens  # type: ignore[misc]
        stream = bench.submit(prompt, max_tokens=2)
        a_step = list[int]()
        while not stream._ended:
            n_before = _restored(bench)
            bench.step()
            a_step.append(_restored(bench) - n_before)
            assert all(batch.n_rows for batch in bench.engine.batches[-1:])
        assert sum(a_step) == 25
        assert max(a_step) <= n_most
        assert all(a_step[: 25 // n_most])  # no step that could have put one back does not
        assert collect(stream).usage.cached_tokens == {"device": 0, "ram": 399}


def test_a_stream_goes_on_while_a_prefix_is_put_back() -> None:
    prompt = _prompt(1, 800)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    bench.submit(_prompt(2, 10), max_tokens=300, ignore_eos=True, client="other")
    bench.step()
    stream = bench.submit(prompt, max_tokens=2)
    while not stream._ended:
        n_before = bench.scheduler.stats.n_generated_tokens
        bench.step()
        assert bench.scheduler.stats.n_generated_tokens > n_before


def test_admission_is_told_once_all_is_back_with_what_came_from_where() -> None:
    prompt = _prompt(3, 600)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    bench.submit(_prompt(2, 10), max_tokens=300, ignore_eos=True, client="other")
    bench.step()
    stream = bench.submit([*prompt, 33], max_tokens=2)
    events = list[Event]()
    while not stream._ended:
        restoring = any(s.phase is Phase.RESTORING for s in bench.scheduler._running)
        assert not (restoring and any(isinstance(e, Admitted) for e in stream._events))
        bench.step()
    events = list(stream)
    (admitted,) = (e for e in events if isinstance(e, Admitted))
    assert admitted.cached_tokens == {"device": 0, "ram": 600}
    stats = bench.scheduler.stats
    assert (stats.n_prompt_tokens_ram, stats.n_restored_blocks) == (600, 38)
    assert collect(events).usage.timings_ms["restore"] > 0


@pytest.mark.parametrize("kind", SPECS)
def test_it_may_be_cancelled_at_any_step_and_the_books_stay_right(kind: str) -> None:
    spec, prompt = SPECS[kind], _prompt(4, 400)
    tiers = _known(prompt, spec)
    for n_steps in range(8):
        bench = Bench(FakeEngine(spec), tiers=tiers)
        bench.cost.restore_s = lambda n_tokens: 0.01 * n_tokens  # type: ignore[method-assign]
        streams = [bench.submit([*prompt, 40 + i], max_tokens=4) for i in range(3)]
        for _ in range(n_steps):
            bench.step()
        streams[0].cancel()
        bench.run()
        for i, stream in enumerate(streams[1:], start=1):
            assert collect(stream).choices[0].ids == truth([*prompt, 40 + i], 4)
        room = bench.scheduler._room
        assert not room._tenants
        assert not bench.scheduler._starts._untold
        bench.step()
        held = [len(bench.engine.slots[s.id].tokens) for s in room.slots._slots]
        assert held == [s.n_held for s in room.slots._slots]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_no_room_for_a_block_means_it_is_computed_and_kept_in_its_tier(kind: str, at: int) -> None:
    class Short(FakeEngine):
        n_seen = 0

        def _restore(self, slot: object, edit: Restore) -> EditResult:  # type: ignore[override]
            self.n_seen += 1
            if self.n_seen != at:
                return super()._restore(slot, edit)  # type: ignore[arg-type]
            slot.is_short = True  # type: ignore[attr-defined]
            return EditResult(len(slot.tokens), slot.first_held, EditOutcome.NO_ROOM)  # type: ignore[attr-defined]

    spec, prompt = SPECS[kind], _prompt(5, 120)
    tiers = _known(prompt, spec)
    n_known = len(tiers._ram)
    bench = Bench(Short(spec), tiers=tiers)
    assert bench.answer(prompt, max_tokens=3).choices[0].ids == truth(prompt, 3)
    assert bench.scheduler.stats.n_refused_blocks == 0
    assert len(tiers._ram) >= n_known


@pytest.mark.parametrize("kind", SPECS)
def test_a_refused_block_is_counted_set_aside_and_exported_anew(kind: str) -> None:
    spec, prompt = SPECS[kind], _prompt(6, 120)
    tiers = _known(prompt, spec)
    refused = list[Restore]()

    def refuses(edit: object) -> bool:
        if isinstance(edit, Restore) and not refused:
            refused.append(edit)
            return True
        return False

    bench = Bench(FakeEngine(spec, refuses=refuses), tiers=tiers)
    assert bench.answer(prompt, max_tokens=3).choices[0].ids == truth(prompt, 3)
    assert bench.scheduler.stats.n_refused_blocks == 1
    after = Bench(FakeEngine(spec), tiers=tiers)
    again = after.answer(prompt, max_tokens=3)
    assert again.choices[0].ids == truth(prompt, 3)
    assert again.usage.cached_tokens.get("ram", 0) > 80


def test_a_device_prefix_that_ends_inside_a_block_is_cut_to_its_start_and_the_rest_put_back() -> None:
    prompt = _prompt(7, 200)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    bench.answer([*prompt[:50], 33], max_tokens=1)
    answer = bench.answer(prompt, max_tokens=2)
    assert answer.usage.cached_tokens["device"] == 48
    assert answer.usage.cached_tokens["ram"] == 151


def test_restoring_that_does_not_pay_is_computed() -> None:
    prompt = _prompt(8, 100)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    bench.cost.restore_pays = lambda n_put, n_saved, used_cells: False  # type: ignore[method-assign]
    assert bench.answer(prompt, max_tokens=2).usage.cached_tokens == {"device": 0}


@pytest.mark.parametrize(("kind", "n_put", "n_saved"), [("any", 204 - 48, 203 - 50), ("recurrent", 201, 201 - 50)])
def test_what_is_weighed_is_all_that_is_put_back_against_what_that_saves(kind: str, n_put: int, n_saved: int) -> None:
    """A state that cannot be cut comes back from its beginning, also where the device has nearly as much."""
    spec, prompt = SPECS[kind], _prompt(8, 200)
    turn = [*prompt, *truth(prompt, 2)[:1], 34, 35]
    tiers = _known(turn if kind == "any" else prompt, spec)
    bench, asked = Bench(FakeEngine(spec), tiers=tiers), list[tuple[int, int]]()
    bench.answer(prompt[:50], max_tokens=1)
    bench.cost.restore_pays = lambda *of: bool(asked.append(of[:2]))  # type: ignore[method-assign,func-returns-value]
    bench.answer([*turn, 36], max_tokens=2)
    assert (n_put, n_saved) in asked


def test_a_private_use_of_a_block_and_an_own_salt_stay_apart() -> None:
    prompt = _prompt(9, 100)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    assert bench.answer(prompt, max_tokens=2, salt="x").usage.cached_tokens == {"device": 0}
    assert bench.answer(prompt, max_tokens=2, is_private=True).usage.cached_tokens == {"device": 0, "ram": 99}


def test_followers_of_one_who_restores_take_over_when_it_is_cancelled() -> None:
    prompt = _prompt(10, 640)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    bench.cost.restore_s = lambda n_tokens: 0.01 * n_tokens  # type: ignore[method-assign]
    streams = [bench.submit([*prompt, 40 + i], max_tokens=2) for i in range(5)]
    bench.step()
    assert [s.phase for s in bench.scheduler._running] == [Phase.RESTORING]
    streams[0].cancel()
    bench.run()
    assert [collect(s).choices[0].ids for s in streams[1:]] == [truth([*prompt, 40 + i], 2) for i in range(1, 5)]
    assert bench.engine.n_restored <= 640 + 16


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("n_known", [1, 16, 200])
def test_followers_of_one_who_restores_a_beginning_wait_for_what_it_computes_after(kind: str, n_known: int) -> None:
    prompt = _prompt(13, 400)
    bench = Bench(FakeEngine(SPECS[kind]), tiers=_known(prompt[:n_known], SPECS[kind]))
    bench.cost.restore_s = lambda n_tokens: 0.01 * n_tokens  # type: ignore[method-assign]
    streams = [bench.submit([*prompt, 40 + i], max_tokens=2) for i in range(6)]
    bench.run()
    answers = [collect(stream) for stream in streams]
    assert [answer.choices[0].ids for answer in answers] == [truth([*prompt, 40 + i], 2) for i in range(6)]
    n_first = len(prompt) - answers[0].usage.cached_tokens.get("ram", 0)
    n_not_worth_waiting = RuntimeConfig().min_wait_prefix_tokens
    assert bench.scheduler.stats.n_prompt_tokens_computed <= n_first + 6 * (1 + n_not_worth_waiting)


@pytest.mark.parametrize("kind", SPECS)
def test_who_computes_after_a_restored_beginning_stops_where_a_follower_forks(kind: str) -> None:
    prompt, n_shared = _prompt(13, 400), 300
    bench = Bench(FakeEngine(SPECS[kind]), tiers=_known(prompt[:200], SPECS[kind]))
    bench.cost.restore_s = lambda n_tokens: 0.01 * n_tokens  # type: ignore[method-assign]
    prompts = [prompt, [*prompt[:n_shared], *_prompt(14, 60)]]
    streams = [bench.submit(prompt, max_tokens=2) for prompt in prompts]
    bench.run()
    assert [collect(stream).choices[0].ids for stream in streams] == [truth(prompt, 2) for prompt in prompts]
    assert sum(200 < position < n_shared for _, position in bench.engine.computed) == n_shared - 201


@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_nobody_waits_for_what_is_put_back_and_could_not_be_cut_there(kind: str) -> None:
    prompt = _prompt(15, 400)
    bench = Bench(FakeEngine(SPECS[kind]), tiers=_known(prompt, SPECS[kind]))
    bench.cost.restore_s = lambda n_tokens: 0.01 * n_tokens  # type: ignore[method-assign]
    follower = [*prompt[:200], *_prompt(16, 60)]
    streams = [bench.submit([*prompt, 40], max_tokens=2), bench.submit(follower, max_tokens=2)]
    bench.step()
    assert [s.run.request_id for s in bench.scheduler._running] == [stream.request_id for stream in streams]
    bench.run()
    assert collect(streams[1]).choices[0].ids == truth(follower, 2)


def test_choices_of_one_request_share_what_is_put_back() -> None:
    prompt = _prompt(11, 320)
    bench = Bench(FakeEngine(), tiers=_known(prompt))
    answer = bench.answer(prompt, n=4, max_tokens=3)
    assert {choice.ids for choice in answer.choices} == {truth(prompt, 3)}
    assert bench.engine.n_restored <= 320
    assert answer.usage.cached_tokens == {"device": 0, "ram": 319}


class _HangingDisk:
    """Reads blocks when it is let, or never."""

    def __init__(self, tiers: Tiers) -> None:
        self.gate = threading.Event()
        assert tiers._reader is not None
        self._read = tiers._reader._read
        tiers._reader._read = self.read

    def read(self, block: Block) -> bytes | None:
        """Wait, then read."""
        self.gate.wait(30)
        return self._read(block)


@pytest.mark.parametrize("kind", SPECS)
def test_a_disk_that_hangs_is_not_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.runtime.kv.restores._PATIENCE_S", 0.1)
    spec, prompt = SPECS[kind], _prompt(12, 200)
    tiers = Tiers(_on_disk(prompt, tmp_path, spec), spec=spec, can_write_disk=True)
    disk = _HangingDisk(tiers)
    bench = Bench(FakeEngine(spec), tiers=tiers)
    stream = bench.submit(prompt, max_tokens=3)
    started_s = time.monotonic()
    while not stream._ended:
        bench.step()
        time.sleep(0.005)
        assert time.monotonic() - started_s < 10
    assert collect(stream).choices[0].ids == truth(prompt, 3)
    disk.gate.set()
    tiers.close()


def _slow_disk(tiers: Tiers, each_s: float) -> None:
    """Have every read take its time."""
    assert tiers._reader is not None
    read = tiers._reader._read

    def slow(block: Block) -> bytes | None:
        time.sleep(each_s)
        return read(block)

    tiers._reader._read = slow


def test_of_three_that_wait_for_the_disk_none_is_starved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.runtime.kv.restores._PATIENCE_S", 0.3)
    prompts = [_prompt(30 + i, 480) for i in range(3)]
    for prompt in prompts:
        config = _on_disk(prompt, tmp_path)
    tiers = Tiers(config, spec=SPEC, can_write_disk=True)
    _slow_disk(tiers, 0.01)
    bench = Bench(FakeEngine(), tiers=tiers)
    streams = [bench.submit(prompt, max_tokens=2, client=str(i)) for i, prompt in enumerate(prompts)]
    bench.run()
    assert [collect(stream).usage.cached_tokens for stream in streams] == [{"device": 0, "disk": 479}] * 3
    tiers.close()


def test_one_that_was_held_back_does_not_give_up_at_its_first_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.runtime.kv.restores._PATIENCE_S", 0.2)
    prompt = _prompt(33, 200)
    tiers = Tiers(_on_disk(prompt, tmp_path), spec=SPEC, can_write_disk=True)
    _slow_disk(tiers, 0.02)
    bench = Bench(FakeEngine(), tiers=tiers)
    stream = bench.submit(prompt, max_tokens=2)
    with monkeypatch.context() as held_back:
        held_back.setattr(bench.scheduler._restores, "_n_tokens", lambda decoding: 0)
        end_s = time.monotonic() + 0.25
        while time.monotonic() < end_s:
            bench.step()
            time.sleep(0.01)
    (sequence,) = bench.scheduler._running
    tiers.forget(sequence.lookup)  # what lay ready for it
    bench.run()
    assert collect(stream).usage.cached_tokens == {"device": 0, "disk": 199}
    tiers.close()


def test_while_the_disk_is_read_nobody_spins_and_others_go_on(tmp_path: Path) -> None:
    prompt = _prompt(13, 200)
    tiers = Tiers(_on_disk(prompt, tmp_path), spec=SPEC, can_write_disk=True)
    disk = _HangingDisk(tiers)
    bench = Bench(FakeEngine(), tiers=tiers)
    stream = bench.submit(prompt, max_tokens=3)
    bench.step()
    bench.loop.step()
    assert bench.loop._wait_s is None or bench.loop._wait_s > 0.01  # the control: it sleeps
    other = bench.answer_beside(_prompt(14, 50), max_tokens=3, client="other")
    assert other.choices[0].ids == truth(_prompt(14, 50), 3)
    assert not stream._ended
    disk.gate.set()
    started_s = time.monotonic()
    while not stream._ended:
        bench.step()
        assert time.monotonic() - started_s < 10
    assert collect(stream).usage.cached_tokens == {"device": 0, "disk": 199}
    tiers.close()


def test_cancel_while_the_disk_is_read_ends_at_once(tmp_path: Path) -> None:
    prompt = _prompt(15, 200)
    tiers = Tiers(_on_disk(prompt, tmp_path), spec=SPEC, can_write_disk=True)
    disk = _HangingDisk(tiers)
    bench = Bench(FakeEngine(), tiers=tiers)
    stream = bench.submit(prompt, max_tokens=3)
    bench.step()
    stream.cancel()
    bench.step()
    assert stream._ended
    assert bench.scheduler.is_idle
    disk.gate.set()
    tiers.close()


def test_one_that_waits_for_the_disk_is_not_failed_by_a_step_of_others(tmp_path: Path) -> None:
    prompt = _prompt(16, 200)
    tiers = Tiers(_on_disk(prompt, tmp_path), spec=SPEC, can_write_disk=True)
    disk = _HangingDisk(tiers)
    bench = Bench(FakeEngine(fail_forwards={1}), tiers=tiers)
    stream = bench.submit(prompt, max_tokens=3)
    bench.step()
    bench.submit(_prompt(17, 30), client="other")
    bench.step()
    disk.gate.set()
    started_s = time.monotonic()
    while not stream._ended:
        bench.step()
        assert time.monotonic() - started_s < 10
    assert collect(stream).choices[0].ids == truth(prompt, 3)
    tiers.close()


@pytest.mark.parametrize("rule", [PrefixRule.ANY, PrefixRule.WINDOW])
def test_exact_cuts_bound_what_is_used_and_kept(rule: PrefixRule) -> None:
    """No token beyond a cut inside its own prompt is taken from anywhere, however it is held."""
    spec = replace(SPEC, cut_tokens=32, prefix_rule=rule, window_tokens=4096 if rule is PrefixRule.WINDOW else 0)
    for n_prompt, n_usable in ((31, 0), (32, 0), (33, 32), (64, 32), (65, 64), (100, 96)):
        prompt = _prompt(18, n_prompt)
        tiers = Tiers(RAM, spec=spec)
        bench = Bench(FakeEngine(spec), tiers=tiers)
        first = bench.answer(prompt, max_tokens=80, ignore_eos=True)
        turn = [*prompt, *first.choices[0].ids, *_prompt(19, 40)]
        assert bench.answer(turn, max_tokens=2).usage.cached_tokens == {"device": n_usable}
        assert bench.answer(prompt, max_tokens=2).usage.cached_tokens == {"device": n_usable}
        after = Bench(FakeEngine(spec), tiers=tiers)
        cached = after.answer(prompt, max_tokens=2).usage.cached_tokens
        assert sum(cached.values()) == n_usable


def test_exact_cuts_bound_what_is_taken_from_one_at_work() -> None:
    spec = replace(SPEC, cut_tokens=32)
    bench = Bench(FakeEngine(spec))
    prompt = _prompt(20, 64)
    bench.submit(prompt, max_tokens=400, ignore_eos=True, client="other")
    for _ in range(60):
        bench.step()
    (sequence,) = bench.scheduler._running
    longer = [*sequence.tokens[:110], 33]
    assert bench.answer_beside(longer, max_tokens=2).usage.cached_tokens == {"device": 32}


def test_what_wants_nothing_kept_serves_nobody_else_but_its_own_choices() -> None:
    bench = Bench(FakeEngine(), tiers=Tiers(RAM, spec=SPEC))
    prompt = _prompt(21, 100)
    bench.submit(prompt, max_tokens=300, ignore_eos=True, cache="off", client="other")
    bench.step()
    assert bench.answer_beside(prompt, max_tokens=2).usage.cached_tokens == {"device": 0}
    n_before = len(bench.engine.computed)
    bench.answer_beside(prompt, max_tokens=1, n=3, cache="off")
    n_rows = sum(position < 99 for _, position in bench.engine.computed[n_before:])
    assert n_rows == 99


def test_streams_that_cannot_be_cut_are_kept_whole() -> None:
    spec = replace(SPEC, copy_shares_memory=False, export_unit=ExportUnit.WHOLE)
    prompt = _prompt(22, 100)
    tiers = _known(prompt, spec)
    turn = [*prompt, *truth(prompt, 2), 33, 34]
    bench = Bench(FakeEngine(spec), tiers=tiers)
    answer = bench.answer(turn, max_tokens=2)
    assert answer.choices[0].ids == truth(turn, 2)
    assert answer.usage.cached_tokens["ram"] == 101


def _spoil(config: TierConfig) -> None:
    """Make every file wrong that the disk tier has."""
    for path in Path(config.disk_dir).rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize("kind", ["any", "window", "recurrent"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_of_a_chain_of_bad_files_all_are_computed_once(kind: str, is_restarted: bool, tmp_path: Path) -> None:
    """Each request found one of them bad, and computed all that follow."""
    prompt, spec = _prompt(60, 1100), SPECS[kind]
    config = _on_disk(prompt, tmp_path, spec)
    _spoil(config)
    n_computed = list[int]()
    tiers = Tiers(config, spec=spec, can_write_disk=True)
    for _ in range(3):
        bench = Bench(FakeEngine(spec), tiers=tiers)
        assert bench.answer(prompt, max_tokens=2).choices[0].ids == truth(prompt, 2)
        n_computed.append(bench.scheduler.stats.n_prompt_tokens_computed)
        while bench.scheduler.exports.has_work:
            bench.step()
        if is_restarted:
            tiers.close()
            tiers = Tiers(config, spec=spec, can_write_disk=True)
    tiers.close()
    assert n_computed[0] == 1100
    assert max(n_computed[1:]) < 2 * RAM.block_tokens


def test_where_the_disk_hangs_what_is_computed_for_it_is_kept_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = _prompt(61, 400)
    tiers = Tiers(_on_disk(prompt, tmp_path), spec=SPEC, can_write_disk=True)
    answers = threading.Event()
    monkeypatch.setattr(tiers._reader, "_read", lambda block: answers.wait(20) and None)
    monkeypatch.setattr(restores, "_PATIENCE_S", 0.05)
    n_computed = list[int]()
    for _ in range(3):
        bench = Bench(tiers=tiers)
        assert bench.answer(prompt, max_tokens=2).choices[0].ids == truth(prompt, 2)
        n_computed.append(bench.scheduler.stats.n_prompt_tokens_computed)
        while bench.scheduler.exports.has_work:
            bench.step()
    answers.set()
    tiers.close()
    assert n_computed == [400, 1, 1]


def test_a_state_that_the_disk_had_and_cannot_give_is_taken_again(tmp_path: Path) -> None:
    """Else nothing would be known of where prompts part."""
    spec, document = SPECS["recurrent"], _prompt(62, 1100)
    config = _on_disk([*document, 40], tmp_path, spec)  # with a checkpoint at the document's end
    _spoil(config)
    tiers = Tiers(config, spec=spec, can_write_disk=True)
    bench = Bench(FakeEngine(spec), tiers=tiers)
    n_computed = list[int]()
    for i in range(3):
        n_before = bench.scheduler.stats.n_prompt_tokens_computed
        bench.answer([*document, 50 + i, *_prompt(63 + i, 8)], max_tokens=2)
        n_computed.append(bench.scheduler.stats.n_prompt_tokens_computed - n_before)
    tiers.close()
    assert n_computed == [1109, 9, 9]
