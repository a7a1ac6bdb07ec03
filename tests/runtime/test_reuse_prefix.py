"""A request that asks for its prompt to be computed gets that, and the same answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.errors import UsageError
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import SPEC, FakeEngine, fake_service
from tests.runtime.harness import Bench

PROMPT = "the same words again and again, and more of them than fit into one chunk " * 4
OPTIONS = GenerationOptions(max_tokens=16, seed=1, sampling={"temperature": 0.0})
SPECS = (
    SPEC,
    replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=600),
    replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT, max_rollback_tokens=0),
    replace(SPEC, copy_shares_memory=False),
)


def n_computed_at(engine: FakeEngine, position: int) -> int:
    return sum(at == position for _, at in engine.computed)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_held_is_not_used_and_the_answer_is_the_same(spec: object) -> None:
    engine = FakeEngine(spec)  # type: ignore[arg-type]
    with fake_service(engine) as service:
        first = collect(service.submit(CompletionRequest(PROMPT, OPTIONS)))
        again = collect(service.submit(CompletionRequest(PROMPT, OPTIONS)))
        n_before = n_computed_at(engine, 0)
        off = collect(service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=False))))
    assert sum(again.usage.cached_tokens.values()) > 0
    assert sum(off.usage.cached_tokens.values()) == 0
    assert n_computed_at(engine, 0) == n_before + 1
    assert off.text == again.text == first.text
    assert engine.broken == []


def test_choices_of_the_request_share_what_it_computes() -> None:
    engine = FakeEngine()
    with fake_service(engine) as service:
        collect(service.submit(CompletionRequest(PROMPT, OPTIONS)))
        n_before = n_computed_at(engine, 0)
        off = collect(service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=False, n=3))))
    assert n_computed_at(engine, 0) == n_before + 1
    assert len({choice.text for choice in off.choices}) == 1


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("options", [{"reuse_prefix": False}, {"cache": "off"}, {}])
@pytest.mark.parametrize("n_seats", [1, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_choices_share_it_also_where_earlier_ones_have_ended(
    spec: EngineSpec, options: dict[str, object], n_seats: int, max_tokens: int
) -> None:
    bench = Bench(FakeEngine(spec), RuntimeConfig(max_running=n_seats))
    prompt = [65 + n % 9 for n in range(300)]
    stream = bench.submit(prompt, n=4, max_tokens=max_tokens, **options)
    bench.run(each_step=lambda n: bench.scheduler._room.slots.check_integrity())
    assert len({choice.ids for choice in collect(stream).choices}) == 1
    assert bench.scheduler.stats.n_prompt_tokens_computed == 303
    again = bench.answer(prompt, max_tokens=1)
    assert sum(again.usage.cached_tokens.values()) == (0 if options.get("cache") == "off" else 299)
    assert bench.scheduler._room.prefixes.left_by == {}


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_what_was_left_for_other_choices_alone_goes_however_they_end(end: str) -> None:
    engine = FakeEngine(fail_forwards={9} if end == "fail" else ())
    bench = Bench(engine, RuntimeConfig(max_running=1))
    prompt = [65 + n % 9 for n in range(100)]
    stream = bench.submit(prompt, n=4, max_tokens=5, ignore_eos=True, cache="off")
    for _ in range(8):
        bench.step()
    assert list(bench.scheduler._room.prefixes.left_by.values()) == [bench.scheduler._running[0].run]  # the control
    beside = bench.submit(prompt, max_tokens=1, client="other") if end == "cancel" else None
    if end == "cancel":
        bench.step()
        stream.cancel()
    bench.run()
    assert beside is None or sum(collect(beside).usage.cached_tokens.values()) == 0
    assert bench.scheduler._room.prefixes.left_by == {}
    assert bench.scheduler.stats.n_retained_slots == (beside is not None)


def test_what_it_computed_serves_others() -> None:
    with fake_service() as service:
        collect(service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=False))))
        after = collect(service.submit(CompletionRequest(PROMPT, OPTIONS)))
    assert sum(after.usage.cached_tokens.values()) > 0


def test_nothing_but_true_or_false_is_taken() -> None:
    with fake_service() as service, pytest.raises(UsageError, match="reuse_prefix"):
        service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=1)))  # type: ignore[arg-type]
