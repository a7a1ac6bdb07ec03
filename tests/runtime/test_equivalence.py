"""However tokens are scheduled, the answer is the same, on every kind of engine.

The fake engine hashes what is really in its cache and breaks loudly on a forbidden edit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.stream import collect
from tests.fake_engine import FakeEngine
from tests.runtime.harness import SPECS, Bench, HalfRight, truth

pytestmark = pytest.mark.parametrize("kind", SPECS)


def _prompts(seed: int, n: int, longest: int = 120) -> list[list[int]]:
    """Prompts that share prefixes now and then, as conversations do."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(n):
        base = rng.choice(prompts)[: rng.randint(1, longest)] if prompts and rng.random() < 0.6 else []
        prompts.append(base + [rng.randint(32, 126) for _ in range(rng.randint(1, longest))])
    return prompts


def test_batched_equals_alone(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]))
    prompts = _prompts(1, 12)
    streams = [bench.submit(prompt) for prompt in prompts]
    bench.run()
    assert [collect(s).choices[0].ids for s in streams] == [truth(p) for p in prompts]


def test_cached_equals_cold_and_computes_one_token(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]))
    prompt = _prompts(2, 1, longest=200)[0]
    first = bench.answer(prompt)
    n_before = len(bench.engine.computed)
    second, third = bench.answer(prompt), bench.answer(prompt)
    assert first.choices == second.choices == third.choices
    assert first.usage.cached_tokens == {"device": 0}
    assert second.usage.cached_tokens == third.usage.cached_tokens == {"device": len(prompt) - 1}
    n_answer = len(first.choices[0].ids)
    assert len(bench.engine.computed) - n_before <= 2 * (n_answer + 1)


def test_next_turn_computes_only_what_is_new(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]))
    prompt = _prompts(3, 1)[0]
    first = bench.answer(prompt)
    turn = [*prompt, *first.choices[0].ids, *b"and then?"]
    second = bench.answer(turn)
    assert second.choices[0].ids == truth(turn)
    assert second.usage.cached_tokens["device"] >= len(prompt) + len(first.choices[0].ids) - 1


def test_chunked_equals_whole(kind: str) -> None:
    for n_rows in (3, 17, 64):
        bench = Bench(FakeEngine(replace(SPECS[kind], max_batch_tokens=max(n_rows, 9))))
        prompt = _prompts(4, 1, longest=300)[0]
        assert bench.answer(prompt).choices[0].ids == truth(prompt)


def test_preempted_equals_not(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=200)
    bench = Bench(FakeEngine(spec))
    prompts = [[65 + i] * 40 for i in range(5)]
    streams = [bench.submit(p, max_tokens=60, ignore_eos=True) for p in prompts]
    bench.run()
    assert bench.scheduler.stats.n_preemptions > 0
    alone = Bench(FakeEngine(SPECS[kind]))
    expected = [alone.answer(p, max_tokens=60, ignore_eos=True).choices[0].ids for p in prompts]
    assert [collect(s).choices[0].ids for s in streams] == expected


def test_drafted_equals_plain_and_saves_steps(kind: str) -> None:
    spec = SPECS[kind]
    drafted = Bench(FakeEngine(spec), drafter=HalfRight())
    prompts = _prompts(6, 6)
    streams = [drafted.submit(p, max_tokens=40) for p in prompts]
    drafted.run()
    answers = [collect(s) for s in streams]
    assert [a.choices[0].ids for a in answers] == [truth(p, 40) for p in prompts]
    may_draft = spec.max_rollback_tokens != 0 and spec.ragged_rows
    assert (sum(a.usage.accepted_draft_tokens for a in answers) > 0) == may_draft
    assert (sum(a.usage.rejected_draft_tokens for a in answers) > 0) == may_draft


def test_drafted_equals_plain_at_any_temperature(kind: str) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.95)
    prompts = _prompts(7, 4)
    answers = []
    for drafter in (None, HalfRight()):
        bench = Bench(FakeEngine(SPECS[kind]), drafter=drafter, sampling=sampling)
        streams = [bench.submit(p, seed=5) for p in prompts]
        bench.run()
        answers.append([collect(s).choices for s in streams])
    assert answers[0] == answers[1]


def test_choices_share_the_prompt_and_differ(kind: str) -> None:
    bench = Bench(FakeEngine(SPECS[kind]), sampling=Sampling(temperature=1.5))
    prompt = _prompts(8, 1, longest=150)[0] + [65] * 80
    answer = bench.answer(prompt, n=4, seed=3)
    assert len({c.ids for c in answer.choices}) > 1
    assert answer.usage.prompt_tokens == len(prompt)
    n_prompt_rows = sum(1 for _, position in bench.engine.computed if position < len(prompt) - 1)
    assert n_prompt_rows == len(prompt) - 1, "the prompt was computed more than once"
    one_by_one = Bench(
        FakeEngine(SPECS[kind]), sampling=Sampling(temperature=1.5), config=RuntimeConfig(max_running=1)
    ).answer(prompt, n=4, seed=3)
    assert one_by_one.choices == answer.choices


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_cancels_and_short_rooms_answers_right(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(SPECS[kind], pool_tokens=rng.choice([260, 420, 1000]), n_slots=rng.choice([2, 4, 9]))
    engine = FakeEngine(spec, short_rooms={rng.randint(5, 200) for _ in range(8)}, fail_copies=rng.random() < 0.2)
    bench = Bench(engine, drafter=HalfRight(rng.randint(1, 6)) if rng.random() < 0.6 else None)
    prompts = _prompts(seed, 30, longest=70)
    streams, cancelled = [], set[int]()

    def feed(n: int) -> None:
        if len(streams) < len(prompts) and rng.random() < 0.5:
            streams.append(bench.submit(prompts[len(streams)][:120]))
        if streams and rng.random() < 0.05:
            victim = rng.randrange(len(streams))
            cancelled.add(victim)
            streams[victim].cancel()

    while len(streams) < len(prompts):
        feed(0)
        bench.run(each_step=feed)
    for i, stream in enumerate(streams):
        choice = collect(stream).choices[0]
        expected = truth(prompts[i][:120])
        if choice.finish_reason == "cancelled":
            assert i in cancelled
        assert choice.ids == expected[: len(choice.ids)]
        if choice.finish_reason == "stop":
            assert choice.ids == expected
    assert bench.scheduler.stats.n_running == bench.scheduler.stats.n_waiting == 0
