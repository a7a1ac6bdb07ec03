"""A request that asks for its prompt to be computed gets that, and the same answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.errors import UsageError
from localllm.runtime.engine import PrefixRule
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import SPEC, FakeEngine, fake_service

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


def test_what_it_computed_serves_others() -> None:
    with fake_service() as service:
        collect(service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=False))))
        after = collect(service.submit(CompletionRequest(PROMPT, OPTIONS)))
    assert sum(after.usage.cached_tokens.values()) > 0


def test_nothing_but_true_or_false_is_taken() -> None:
    with fake_service() as service, pytest.raises(UsageError, match="reuse_prefix"):
        service.submit(CompletionRequest(PROMPT, replace(OPTIONS, reuse_prefix=1)))  # type: ignore[arg-type]
