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
