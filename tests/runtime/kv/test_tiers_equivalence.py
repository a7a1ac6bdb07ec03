"""Whatever a tier gave back, the answer is the same, on every kind of engine, and nothing is computed twice.

The fake engine's next token is a hash of what is really in its cache, so a wrong block changes the answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import Edit, EngineSpec, PrefixRule, Restore
from localllm.runtime.kv.tiers import CutRule, Tiers
from localllm.runtime.stream import collect
from tests.fake_engine import FakeEngine
from tests.runtime.harness import SPECS, Bench, HalfRight, truth

RAM = TierConfig(ram_bytes=1 << 24, block_tokens=16)
pytestmark = pytest.mark.parametrize("kind", SPECS)


def _tiers(spec: EngineSpec, config: TierConfig = RAM, *, disk: bool = False) -> Tiers:
    return Tiers(config, spec=replace(spec, fingerprint="fake"), model_name="fake", can_write_disk=disk)


def _bench(kind: str, tiers: Tiers | None = None, **engine: object) -> Bench:
    spec = SPECS[kind]
    return Bench(FakeEngine(spec, **engine), tiers=tiers or _tiers(spec))  # type: ignore[arg-type]


def _finish(bench: Bench) -> None:
    """Let an idle loop export what is left."""
    while bench.scheduler.exports.has_work:
        bench.step()


def _restarted(kind: str, bench: Bench, **engine: object) -> Bench:
    """A new engine, whose tiers are the old ones."""
    _finish(bench)
    return _bench(kind, bench.tiers, **engine)


def _prompt(seed: int, n: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n)]


def _n_restored(bench: Bench) -> int:
    return bench.engine.n_restored


def test_restarted_equals_cold_and_computes_one_token(kind: str) -> None:
    prompt = _prompt(1)
    before = _bench(kind)
    first = before.answer(prompt)
    after = _restarted(kind, before)
    second = after.answer(prompt)
    assert second.choices == first.choices
    n_known = second.usage.cached_tokens.get("ram", 0)
    if before.tiers.rule is CutRule.ENDS:  # a window's blocks are used up to their ends
        assert len(prompt) - 1 - n_known < 2 * RAM.block_tokens
    else:
        assert n_known == len(prompt) - 1
    assert second.usage.cached_tokens["device"] == 0
    n_rows = sum(1 for _, position in after.engine.computed if position < len(prompt))
    assert n_rows == len(prompt) - n_known


def test_the_next_turn_after_a_restart_computes_only_what_is_new(kind: str) -> None:
    prompt = _prompt(2)
    before = _bench(kind)
    first = before.answer(prompt)
    turn = [*prompt, *first.choices[0].ids, *b"and then?"]
    after = _restarted(kind, before)
    second = after.answer(turn)
    assert second.choices[0].ids == truth(turn)
    if before.tiers.rule is not CutRule.ENDS:
        assert second.usage.cached_tokens["ram"] >= len(prompt) + len(first.choices[0].ids) - 1


def test_a_shared_prefix_that_ends_inside_a_block_is_not_computed_again(kind: str) -> None:
    shared, spec = _prompt(3, 75), SPECS[kind]
    before = _bench(kind)
    before.answer([*shared, *_prompt(4, 20)])
    after = _restarted(kind, before)
    prompt = [*shared, *_prompt(5, 20)]
    answer = after.answer(prompt)
    assert answer.choices[0].ids == truth(prompt)
    if spec.prefix_rule is PrefixRule.ANY:
        assert answer.usage.cached_tokens.get("ram") == len(shared)


@pytest.mark.parametrize("n", [1, 2, 16, 17])
def test_short_prompts_and_prefixes_of_cached_ones(kind: str, n: int) -> None:
    prompt = _prompt(6, 60)
    before = _bench(kind)
    before.answer(prompt)
    after = _restarted(kind, before)
    assert after.answer(prompt[:n]).choices[0].ids == truth(prompt[:n])
    assert after.answer(prompt[:n]).choices[0].ids == truth(prompt[:n])


def test_an_edit_in_the_middle(kind: str) -> None:
    prompt = _prompt(7, 120)
    before = _bench(kind)
    before.answer(prompt)
    edited = [*prompt[:50], 33, *prompt[51:]]
    after = _restarted(kind, before)
    assert after.answer(edited).choices[0].ids == truth(edited)
    assert after.answer(prompt).choices[0].ids == truth(prompt)


def test_64_branches_of_one_prefix_put_it_back_once(kind: str) -> None:
    shared, spec = _prompt(8, 96), SPECS[kind]
    before = _bench(kind)
    before.answer(shared)
    after = _restarted(kind, before)
    prompts = [[*shared, 40 + i, 41] for i in range(64)]
    streams = [after.submit(p, max_tokens=4) for p in prompts]
    after.run()
    assert [collect(s).choices[0].ids for s in streams] == [truth(p, 4) for p in prompts]
    if spec.copy_shares_memory and spec.prefix_rule is PrefixRule.ANY and spec.mixes_prefill_and_decode:
        assert _n_restored(after) <= 2 * len(shared)


def test_evicted_equals_cold(kind: str) -> None:
    """Documents that together overflow the pool, asked about in turn until it has turned over twenty times."""
    spec = replace(SPECS[kind], pool_tokens=400, n_slots=4)
    bench = Bench(FakeEngine(spec), tiers=_tiers(spec))
    documents = [_prompt(20 + i, 160) for i in range(4)]
    for turn in range(13):
        for document in documents:
            prompt = [*document, 50 + turn, 51]
            assert bench.answer(prompt, max_tokens=4).choices[0].ids == truth(prompt, 4)
            _finish(bench)
    n_asked = 13 * 4
    if bench.tiers.rule is CutRule.ANYWHERE:
        n_new = bench.scheduler.stats.n_prompt_tokens_computed
        assert n_new <= 4 * 160 + n_asked * 3
    assert sum(len(d) for d in documents) * 13 >= 20 * spec.pool_tokens


def test_a_preempted_sequence_goes_on_with_what_was_kept(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=200)
    bench = Bench(FakeEngine(spec), tiers=_tiers(spec))
    prompts = [[65 + i] * 40 for i in range(5)]
    streams = [bench.submit(p, max_tokens=60, ignore_eos=True) for p in prompts]
    bench.run()
    assert bench.scheduler.stats.n_preemptions > 0
    alone = Bench(FakeEngine(SPECS[kind]))
    expected = [alone.answer(p, max_tokens=60, ignore_eos=True).choices[0].ids for p in prompts]
    assert [collect(s).choices[0].ids for s in streams] == expected


def test_cancel_while_it_is_put_back(kind: str) -> None:
    prompt = _prompt(9, 200)
    before = _bench(kind)
    before.answer(prompt)
    after = _restarted(kind, before)
    streams = [after.submit(prompt) for _ in range(3)]
    after.step()
    streams[0].cancel()
    after.run()
    assert [collect(s).choices[0].ids for s in streams[1:]] == [truth(prompt)] * 2


def test_a_block_that_the_engine_refuses_is_set_aside_and_computed(kind: str) -> None:
    prompt = _prompt(10, 120)
    before = _bench(kind)
    before.answer(prompt)
    after = _restarted(kind, before, refuses=_nth_restore(2))
    assert after.answer(prompt).choices[0].ids == truth(prompt)
    assert after.answer(prompt).choices[0].ids == truth(prompt)


def test_a_wrong_block_changes_the_answer(kind: str) -> None:
    """The control: were keys made of less than all that matters, these tests would notice."""
    prompt, other = _prompt(11, 17), _prompt(12, 17)
    before = _bench(kind)
    before.answer(other)
    _finish(before)
    ram = before.tiers._ram
    blobs = {(entry.block.start, entry.block.n_tokens): entry.blob for entry in ram}
    before.answer(prompt)
    _finish(before)
    for entry in ram:
        if entry.block.start == 0:
            entry.blob = blobs.get((0, entry.block.n_tokens), entry.blob)
    after = _bench(kind, before.tiers)
    assert after.answer(prompt).choices[0].ids != truth(prompt)


def test_nothing_is_kept_or_used_where_the_request_says_so(kind: str) -> None:
    prompt = _prompt(13)
    bench = _bench(kind)
    assert bench.answer(prompt, cache="off").usage.cached_tokens == {"device": 0}
    _finish(bench)
    assert bench.engine.n_exported == 0
    assert bench.scheduler.stats.n_retained_slots == 0
    bench.answer(prompt)
    _finish(bench)
    assert bench.answer(prompt, cache="off").usage.cached_tokens == {"device": 0}


def test_another_salt_shares_nothing(kind: str) -> None:
    prompt = _prompt(14)
    bench = _bench(kind)
    bench.answer(prompt, salt="one")
    assert bench.answer(prompt, salt="two").usage.cached_tokens == {"device": 0}
    _finish(bench)
    assert sum(bench.answer(prompt, salt="one").usage.cached_tokens.values()) > 0
    after = _restarted(kind, bench)
    assert after.answer(prompt, salt="three").usage.cached_tokens == {"device": 0}


def test_what_is_retained_goes_once_it_is_safe_and_somebody_else_runs(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=4000)
    bench = Bench(FakeEngine(spec), tiers=_tiers(spec))
    for seed in range(5):
        bench.answer(_prompt(30 + seed, 300))
        _finish(bench)
    bench.submit(_prompt(40, 300))
    bench.step()
    bench.step()
    assert bench.scheduler.stats.retained_cells <= bench.cost.cells_within(0.02)
    bench.run()


def test_from_disk_after_the_process_ended(kind: str, tmp_path: Path) -> None:
    config = replace(RAM, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 24, keeps_all=True)
    spec, prompt = SPECS[kind], _prompt(15, 200)
    before = Bench(FakeEngine(spec), tiers=_tiers(spec, config, disk=True))
    first = before.answer(prompt)
    _finish(before)
    before.tiers.close()
    tiers = _tiers(spec, config, disk=True)
    after = Bench(FakeEngine(spec), tiers=tiers)
    second = after.answer(prompt)
    assert second.choices == first.choices
    if tiers.rule is not CutRule.ENDS:
        assert second.usage.cached_tokens == {"device": 0, "disk": len(prompt) - 1}
    assert second.usage.cached_tokens["disk"] > len(prompt) - 40
    tiers.close()


def test_what_another_process_deletes_is_computed_once_and_kept_again(kind: str, tmp_path: Path) -> None:
    """Blocks after the first that is gone passed for kept: each request had one of them written anew."""
    config = replace(RAM, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 24, keeps_all=True, ram_bytes=0)
    spec, prompt = SPECS[kind], _prompt(16, 1100)
    mine, theirs = _tiers(spec, config, disk=True), _tiers(spec, config, disk=True)
    bench, n_computed = Bench(FakeEngine(spec), tiers=mine), list[int]()
    for turn in range(4):
        n_before = bench.scheduler.stats.n_prompt_tokens_computed
        assert bench.answer(prompt, max_tokens=4).choices[0].ids == truth(prompt, 4)
        n_computed.append(bench.scheduler.stats.n_prompt_tokens_computed - n_before)
        _finish(bench)
        _written(mine)
        bench.scheduler._room.evict_one()
        if turn == 1:
            theirs.clear()
    n_least = n_computed[1]
    assert n_least < 2 * RAM.block_tokens  # a window's blocks are used up to their ends
    assert n_computed == [1100, n_least, 1100, n_least]
    mine.close()
    theirs.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_answers_right(kind: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    config = replace(
        RAM,
        ram_bytes=rng.choice([0, 4_000, 40_000, 1 << 22]),
        disk_dir=str(tmp_path / "kv") if rng.random() < 0.5 else "",
        disk_bytes=rng.choice([20_000, 1 << 22]),
    )
    spec = replace(SPECS[kind], pool_tokens=rng.choice([260, 420, 1000]), n_slots=rng.choice([2, 4, 9]))
    tiers = _tiers(spec, config, disk=True)
    engine = FakeEngine(
        spec,
        short_rooms={rng.randint(5, 200) for _ in range(6)},
        fail_copies=rng.random() < 0.2,
        refuses=(lambda edit: isinstance(edit, Restore) and rng.random() < 0.1) if rng.random() < 0.5 else _never,
    )
    bench = Bench(engine, tiers=tiers, drafter=HalfRight(rng.randint(1, 6)) if rng.random() < 0.6 else None)
    prompts = list[list[int]]()
    for _ in range(40):
        base = rng.choice(prompts)[: rng.randint(1, 120)] if prompts and rng.random() < 0.7 else []
        prompts.append((base + [rng.randint(32, 126) for _ in range(rng.randint(1, 50))])[:140])
    streams, cancelled = [], set[int]()

    def feed(n: int) -> None:
        if len(streams) < len(prompts) and rng.random() < 0.4:
            streams.append(bench.submit(prompts[len(streams)], cache="off" if rng.random() < 0.1 else "on"))
        if streams and rng.random() < 0.05:
            victim = rng.randrange(len(streams))
            cancelled.add(victim)
            streams[victim].cancel()

    while len(streams) < len(prompts):
        feed(0)
        bench.run(each_step=feed)
    for i, stream in enumerate(streams):
        choice, expected = collect(stream).choices[0], truth(prompts[i])
        assert choice.ids == expected[: len(choice.ids)]
        if choice.finish_reason == "cancelled":
            assert i in cancelled
        if choice.finish_reason == "stop":
            assert choice.ids == expected
    tiers.close()


def _written(tiers: Tiers) -> None:
    """Wait until nothing waits to be written."""
    assert tiers.disk is not None
    end_s = time.monotonic() + 10
    while tiers.disk.stats().waiting_bytes:
        assert time.monotonic() < end_s
        time.sleep(0.002)


def _never(edit: Edit) -> bool:
    return False


def _nth_restore(n: int) -> Callable[[Edit], bool]:
    seen = list[Edit]()

    def refuses(edit: Edit) -> bool:
        if not isinstance(edit, Restore):
            return False
        seen.append(edit)
        return len(seen) == n

    return refuses
