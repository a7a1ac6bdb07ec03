"""Requests of different salts share nothing: on the device, in RAM, on disk, and of what is being computed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import Restore
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.stream import collect
from tests.fake_engine import FakeEngine
from tests.runtime.harness import SPECS, Bench, truth

pytestmark = pytest.mark.parametrize("kind", SPECS)
PROMPT = [random.Random(1).randint(32, 126) for _ in range(100)]


def _bench(kind: str, config: TierConfig) -> Bench:
    spec = replace(SPECS[kind], fingerprint="fake")
    return Bench(
        FakeEngine(spec), tiers=Tiers(config, spec=spec, model_name="fake", can_write_disk=bool(config.disk_dir))
    )


def _finish(bench: Bench) -> None:
    while bench.scheduler.exports.has_work:
        bench.step()


def _n_rows(bench: Bench) -> int:
    """Return how many prompt rows the engine has computed."""
    return bench.scheduler.stats.n_prompt_tokens_computed


def test_neither_device_nor_ram_is_shared(kind: str) -> None:
    bench = _bench(kind, TierConfig(ram_bytes=1 << 24, block_tokens=16))
    first = bench.answer(PROMPT, salt="a")
    _finish(bench)
    n_cold = _n_rows(bench)
    for salt in ("b", "", "a\0", "A"):
        before = _n_rows(bench)
        answer = bench.answer(PROMPT, salt=salt)
        _finish(bench)
        assert sum(answer.usage.cached_tokens.values()) == 0
        assert _n_rows(bench) - before == n_cold
        assert answer.choices == first.choices
    assert sum(bench.answer(PROMPT, salt="a").usage.cached_tokens.values()) > 0


def test_nor_is_disk_after_a_restart(kind: str, tmp_path: Path) -> None:
    config = TierConfig(ram_bytes=1 << 24, disk_dir=str(tmp_path), disk_bytes=1 << 26, block_tokens=16)
    before = _bench(kind, config)
    for _ in range(2):  # a short prefix is written on its second use
        before.answer(PROMPT, salt="a")
        _finish(before)
    before.tiers.close()
    after = _bench(kind, config)
    other = after.answer(PROMPT, salt="b")
    assert sum(other.usage.cached_tokens.values()) == 0
    again = after.answer(PROMPT, salt="a")
    assert again.usage.cached_tokens.get("disk", 0) > 0
    assert again.choices == other.choices
    after.tiers.close()


def test_nobody_waits_for_a_prefix_of_another_salt(kind: str) -> None:
    bench = _bench(kind, TierConfig(ram_bytes=0))
    streams = [bench.submit(PROMPT, salt=salt) for salt in "abc"]
    bench.run()
    answers = [collect(stream) for stream in streams]
    assert [sum(answer.usage.cached_tokens.values()) for answer in answers] == [0, 0, 0]
    assert all(answer.choices[0].ids == truth(PROMPT)[: len(answer.choices[0].ids)] for answer in answers)
    assert _n_rows(bench) == 3 * len(PROMPT)
    assert not any(isinstance(edit, Restore) for edit in bench.engine.edits)


def test_what_connections_left_makes_nobody_elses_go(kind: str) -> None:
    bench = _bench(kind, TierConfig(ram_bytes=1 << 24, block_tokens=16))
    bench.answer(PROMPT, salt="key:a")
    _finish(bench)
    n_bytes = bench.tiers.stats().ram_bytes
    bench.tiers.limit_ram(n_bytes + n_bytes // 2)
    for number in range(8):
        bench.answer(PROMPT, salt=f"connection:{number}", is_private=True, cache="pin")
        _finish(bench)
    bench.scheduler.clear_retained()
    assert bench.tiers.stats().ram_bytes > n_bytes
    assert bench.answer(PROMPT, salt="key:a").usage.cached_tokens.get("ram", 0) > 0
    assert not any(entry.note.is_pinned for entry in bench.tiers._ram)


def test_a_connection_finds_its_own_while_there_is_room(kind: str) -> None:
    bench = _bench(kind, TierConfig(ram_bytes=1 << 24, block_tokens=16))
    bench.answer(PROMPT, salt="connection:1", is_private=True)
    _finish(bench)
    bench.scheduler.clear_retained()
    assert bench.answer(PROMPT, salt="connection:1", is_private=True).usage.cached_tokens.get("ram", 0) > 0


def test_what_finds_no_room_is_tried_once_and_may_be_cleared(kind: str) -> None:
    bench = _bench(kind, TierConfig(ram_bytes=1, block_tokens=16))
    for salt, is_private in (("connection:1", True), ("key:a", False)):
        bench.answer(PROMPT, salt=salt, is_private=is_private)
        _finish(bench)
        room = bench.scheduler._room
        (slot,) = room.slots.retained()
        assert room.exports.is_safe(slot) == is_private
        assert room.exports.rescue(slot) != is_private
        bench.scheduler.clear_retained()
        bench.step()
