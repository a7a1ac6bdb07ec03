"""The whole benchmark on a service without a model: what is loaded, in which order, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.bench.engine.formats import render
from localllm.bench.engine.measuring import Sizes
from localllm.bench.engine.plan import Plan, measure
from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.rows import EngineFacts
from localllm.models.info import ModelInfo, read_info
from localllm.runtime.config import LoadConfig
from localllm.runtime.service import Service
from localllm.runtime.types import Request
from tests.bench.engine.rows import FACTS
from tests.bench.engine.test_measuring import takes_a_moment
from tests.fake_engine import SPEC, FakeEngine, fake_service

SMALL = Sizes(
    n_prompt=24,
    n_gen=8,
    n_depth=16,
    n_reps=2,
    n_parallel=3,
    n_gen_parallel=4,
    overhead_depth=6,
    overhead_gen=4,
    overhead_pairs=2,
    overhead_depth_parallel=4,
    overhead_gen_parallel=4,
    overhead_pairs_parallel=2,
)
SMALL_PLAN = Plan("any", sizes=SMALL, n_start_pairs=0, probe_bytes=1 << 20)
ROWS = ["pp24", "tg8", "tg4 @ d6", "pp24 @ d16", "tg4 x3", "tg4 @ d4 x3"]


class FakeBare:
    """A bare loop that takes a millisecond a step."""

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> float:
        return 0.001 * n_steps

    def close(self) -> None:
        pass


class FakeOpener:
    """Services over fake engines; remembers how each was asked for and whether it was closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configs: list[LoadConfig] = []
        self.engines: list[FakeEngine] = []
        self.bare_configs: list[LoadConfig] = []

    def info(self) -> ModelInfo:
        return read_info(self.path)

    def service(self, config: LoadConfig, sized_for: Request | None = None) -> Service:
        self.configs.append(config)
        n_slots = config.parallel + config.retained + 1
        engine = FakeEngine(replace(SPEC, n_slots=n_slots, pool_tokens=config.ctx or 256), on_forward=takes_a_moment)
        self.engines.append(engine)
        return fake_service(engine)

    def bare(self, config: LoadConfig) -> FakeBare:
        self.bare_configs.append(config)
        return FakeBare()

    def facts(self, service: Service) -> EngineFacts:
        return FACTS


@pytest.fixture
def opener(tiny: Path) -> FakeOpener:
    return FakeOpener(tiny / "llama-dense.gguf")


def run(opener: FakeOpener, plan: Plan) -> Recorder:
    recorder = Recorder()
    measure(plan, recorder, opener)
    return recorder


def test_every_kind_of_row_in_order(opener: FakeOpener) -> None:
    recorder = run(opener, SMALL_PLAN)
    assert [row.case.name for row in recorder.rows] == ROWS
    document = json.loads(render(recorder.report(partial=False), "json"))
    assert document["overhead_ratio"] > 0
    assert document["overhead_ratio_parallel"] > 0
    assert document["start_ratio"] is None
    assert document["notes"] == []
    assert document["rows"][1]["bandwidth_share"] > 0
    assert "{" not in " ".join(document["method"].values())


def test_each_side_of_a_comparison_gets_the_same_settings(opener: FakeOpener) -> None:
    run(opener, replace(SMALL_PLAN, config=LoadConfig(threads=1)))
    single, deep, several = opener.configs
    assert (single.parallel, single.retained) == (1, 0)
    assert (deep.parallel, deep.retained) == (1, 1)
    assert (several.parallel, several.retained) == (3, 0)
    assert opener.bare_configs == [single, several]
    assert all(config.threads == 1 and config.ctx for config in opener.configs)


def test_everything_opened_is_closed(opener: FakeOpener) -> None:
    run(opener, SMALL_PLAN)
    assert all(engine.closed for engine in opener.engines)


def test_rows_that_do_not_fit_the_context_are_left_out_with_both_numbers(opener: FakeOpener) -> None:
    recorder = run(opener, replace(SMALL_PLAN, config=LoadConfig(ctx=40)))
    assert [row.case.name for row in recorder.rows] == ["pp24", "tg8", "tg4 @ d6", "tg4 x3"]
    assert recorder.notes == [
        "pp24 @ d16: it takes 48 tokens, the context holds 40",
        "tg4 @ d4 x3: it takes 48 tokens, the context holds 40",
    ]
    assert {config.ctx for config in opener.configs} == {40}


def test_the_fingerprint_tells_what_was_measured_on_what(opener: FakeOpener) -> None:
    found = run(opener, SMALL_PLAN).fingerprint
    assert len(found["model"]["sha256"][0]) == 64
    assert found["model"]["size_bytes"] == opener.path.stat().st_size
    assert found["machine"]["cpu"]["n_cores"] >= 1
    assert found["machine"]["ram_bytes"] > 1 << 20
    assert found["software"]["llama-cpp-python"]
    assert found["software"]["wheel"]
    assert len(found["load_average_before"]) == len(found["load_average_after"]) == 3
    json.dumps(found)


def test_an_interruption_keeps_what_was_measured_and_closes_the_engine(opener: FakeOpener) -> None:
    recorder = Recorder()

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("tg8") and done == 1:
            raise KeyboardInterrupt

    recorder.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        measure(SMALL_PLAN, recorder, opener)
    assert [(row.case.name, row.partial, len(row.samples_ns)) for row in recorder.rows] == [
        ("pp24", False, 2),
        ("tg8", True, 1),
    ]
    assert all(engine.closed for engine in opener.engines)
    assert recorder.fingerprint["load_average_before"]
