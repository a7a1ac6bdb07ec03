"""What others hold, or compute, is computed once more only where no engine could have taken it over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.forks import Forks
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.prepare import prepare
from localllm.runtime.stream import TokenStream
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import FakeEngine
from tests.runtime.harness import SPECS, Bench, HalfRight, truth

RAM = TierConfig(ram_bytes=1 << 24, block_tokens=16)
CHECKPOINTED = ["recurrent", "hybrid", "everything hard"]


def _prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n)]


def _question(n: int) -> list[int]:
    return [40 + n, *_prompt(n, 8)]


def _n_computed(bench: Bench, prompt: list[int], **options: object) -> int:
    """Return how many prompt tokens were computed for a right answer."""
    n_before = bench.scheduler.stats.n_prompt_tokens_computed
    assert bench.answer(prompt, **{"max_tokens": 5, **options}).choices[0].ids == truth(prompt, 5)
    return bench.scheduler.stats.n_prompt_tokens_computed - n_before


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("with_ram", [False, True])
def test_a_document_of_which_the_pool_holds_one_copy_alone_is_computed_once(kind: str, with_ram: bool) -> None:
    spec = replace(SPECS[kind], pool_tokens=600)
    bench = Bench(FakeEngine(spec), tiers=Tiers(RAM, spec=spec) if with_ram else None)
    if kind == "window" and not with_ram:
        pytest.skip("what a window no longer has can only come back from a tier")
    document = _prompt(1, 400)
    n_computed = [_n_computed(bench, [*document, *_question(i)]) for i in range(6)]
    n_first = 2 if kind in CHECKPOINTED else 1  # the second finds out where the questions part
    assert n_computed[n_first:] == [9] * (6 - n_first)


@pytest.mark.parametrize("kind", ["any", "unshared copies", "recurrent", "everything hard"])
def test_two_documents_take_turns_in_two_slots(kind: str) -> None:
    bench = Bench(FakeEngine(replace(SPECS[kind], n_slots=3)))
    documents = [_prompt(10, 300), _prompt(11, 300)]
    n_computed = [_n_computed(bench, [*documents[i % 2], *_question(i)]) for i in range(12)]
    n_first = 4 if kind in CHECKPOINTED else 2
    assert n_computed[n_first:] == [9] * (12 - n_first)


def test_what_a_question_leaves_behind_stays_where_that_is_the_greater_part() -> None:
    bench = Bench(FakeEngine(replace(SPECS["any"], n_slots=3)))
    system = _prompt(30, 40)
    bench.answer(old := _prompt(31, 200), max_tokens=5)
    bench.answer(chat := [*system, *_prompt(32, 300)], max_tokens=5)
    bench.answer([*system, *_prompt(33, 50)], max_tokens=5)
    assert _n_computed(bench, [*chat, 40]) == 1
    assert _n_computed(bench, [*old, 40]) == 201


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_the_third_question_about_a_document_finds_where_the_second_parted(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]))
    document = _prompt(40, 300)
    n_computed = [_n_computed(bench, [*document, *_question(i)]) for i in range(5)]
    assert n_computed == [309, 309, 9, 9, 9]


def test_a_checkpoint_serves_also_after_the_last_draft_was_rejected() -> None:
    n_settling = 0
    for seed in range(8):
        bench = Bench(FakeEngine(SPECS["hybrid"]), drafter=HalfRight())
        prompt = _prompt(50 + seed, 200)
        bench.answer(prompt, max_tokens=500)
        n_settling += any(slot.is_settling for slot in bench.scheduler._room.slots.retained())
        assert _n_computed(bench, prompt) == 1
    assert n_settling > 2  # the control


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_documents_asked_about_in_turn_are_found_though_the_device_keeps_none(kind: str) -> None:
    spec = SPECS[kind]
    bench = Bench(FakeEngine(spec), tiers=Tiers(RAM, spec=spec))
    documents = [_prompt(60 + i, 300) for i in range(3)]
    n_computed = list[int]()
    for i in range(12):
        n_computed.append(_n_computed(bench, [*documents[i % 3], *_question(i)]))
        bench.scheduler._room.evict_one()
    assert n_computed[6:] == [9] * 6


@pytest.mark.parametrize(("n_common", "is_waited_for"), [(100, False), (190, True)])
def test_only_what_would_be_waited_for_is_told_to_be_coming(n_common: int, is_waited_for: bool) -> None:
    """Nobody waits for a state that has passed where the prompts part: all is computed at once."""
    spec = replace(SPECS["recurrent"], max_batch_tokens=64)
    bench, prompt = Bench(FakeEngine(spec)), _prompt(70, 300)
    bench.submit(prompt, max_tokens=2)
    for _ in range(2):
        bench.step()
    request = CompletionRequest((*prompt[:n_common], 40, 41), GenerationOptions(max_tokens=2))
    (sequence,) = prepare(request, bench.facts, spec, TokenStream("", lambda stream: None)).sequences
    assert bench.scheduler._running[0].n_computed == 128
    told = bench.scheduler.prospect(sequence)
    assert (told.n_coming > told.n_device) == is_waited_for
    assert (bench.scheduler._room.prefixes.leader_of(sequence, 32) is not None) == is_waited_for
    bench.run()


def test_where_prompts_part_is_forgotten_with_the_rest_and_not_told_to_another_salt() -> None:
    forks = Forks()
    forks.add(("", ""), [1, 2, 3, 4])
    assert forks.find(("", ""), [1, 2, 3, 5]) == 3
    assert forks.find(("", "salt"), [1, 2, 3, 5]) == 0
    forks.clear()
    assert forks.find(("", ""), [1, 2, 3, 5]) == 0


def test_a_prompt_is_remembered_once_however_often_it_comes() -> None:
    bench = Bench(FakeEngine(SPECS["recurrent"]))
    for options in ({}, {"n": 3}, {"cache": "off"}):
        bench.answer(_prompt(80, 100), max_tokens=2, **options)
    assert bench.scheduler._room.prefixes.forks._n_tokens == 100
    bench.answer(_prompt(81, 100), max_tokens=2, cache="off")
    assert bench.scheduler._room.prefixes.forks._n_tokens == 100


def test_the_oldest_prompts_are_forgotten_first() -> None:
    forks = Forks()
    for i in range(5):
        forks.add(("", ""), [i] * 100_000)
    assert [forks.find(("", ""), [i] * 10) for i in range(5)] == [0, 0, 0, 10, 10]
