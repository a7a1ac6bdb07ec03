"""On an engine whose results depend on the rows of a forward, exact cuts make every answer the one that is alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.engine import Batch, EngineSpec, ExportUnit, PrefixRule, StepOutput
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.stream import Answer, TokenStream, collect
from localllm.runtime.turns import Turns
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import Bench, HalfRight

CUT = 16
EXACT = replace(SPEC, copy_shares_memory=False, mixes_prefill_and_decode=False, cut_tokens=CUT, exact_rows=3)
WHOLE: dict[str, Any] = {"export_unit": ExportUnit.WHOLE}
SPECS: dict[str, EngineSpec] = {
    "blocks": replace(EXACT, joins_blocks=True),
    "one row": replace(EXACT, joins_blocks=True, exact_rows=1),
    "window": replace(EXACT, prefix_rule=PrefixRule.WINDOW, window_tokens=24, **WHOLE),
    "recurrent": replace(EXACT, prefix_rule=PrefixRule.CHECKPOINT, max_rollback_tokens=0, **WHOLE),
}
RAM = TierConfig(ram_bytes=1 << 24, block_tokens=CUT)
EVERY = pytest.mark.parametrize("kind", SPECS)


class ShapedEngine(FakeEngine):
    """Its cells remember the rows of the forward that they came from, and the next token depends on that.

    No window loses cells in a forward; only what is put back lacks some.
    """

    def forward(self, batch: Batch) -> StepOutput:
        """Run the rows; more than a few in one forward leave other cells than each by itself."""
        firsts = {item.slot: self.slots[item.slot].first_held for item in batch.items}
        output = replace(super().forward(batch), first_held=firsts)
        for slot, first_held in firsts.items():
            self.slots[slot].first_held = first_held
        for item in batch.items if batch.n_rows > EXACT.exact_rows else ():
            n_rows, tokens = len(item.tokens), self.slots[item.slot].tokens
            shape = 1000 * (1 + item.start + 512 * batch.n_rows)
            tokens[-n_rows:] = [token + shape for token in tokens[-n_rows:]]
        return output


def _prompt(seed: int, n_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n_tokens)]


STEM = _prompt(1, 90)
PROMPTS = (
    STEM,
    STEM[:1],
    STEM[:15],
    STEM[:16],
    STEM[:17],
    STEM[:40] + _prompt(2, 30),
    STEM + _prompt(3, 45),
    _prompt(4, 64),
    _prompt(5, 65),
)


def _bench(spec: EngineSpec, tiers: Tiers | None = None, **options: Any) -> Bench:
    return Bench(ShapedEngine(spec), tiers=tiers or Tiers(RAM, spec=spec), **options)


def _ids(answer: Answer) -> list[tuple[int, ...]]:
    return [choice.ids for choice in answer.choices]


def _cold(spec: EngineSpec, prompt: Sequence[int], **options: object) -> list[tuple[int, ...]]:
    """Return the ids of an answer that is alone and finds nothing."""
    return _ids(_bench(spec).answer(prompt, **options))


@EVERY
def test_repeated_and_restarted_equal_cold(kind: str) -> None:
    spec = SPECS[kind]
    cold = [_cold(spec, prompt) for prompt in PROMPTS]
    bench = _bench(spec)
    for _ in range(2):
        assert [_ids(bench.answer(prompt)) for prompt in PROMPTS] == cold
    while bench.scheduler.exports.has_work:
        bench.step()
    after = _bench(spec, bench.tiers)
    assert [_ids(after.answer(prompt)) for prompt in PROMPTS] == cold
    assert after.engine.n_restored >= 64


@EVERY
def test_a_hit_is_cut_down_to_a_cut(kind: str) -> None:
    bench = _bench(SPECS[kind])
    bench.answer(STEM)
    assert bench.answer(STEM).usage.cached_tokens == {"device": 80}
    turn = [*STEM, *_ids(bench.answer(STEM))[0], *_prompt(6, 20)]
    assert bench.answer(turn).usage.cached_tokens == {"device": 80}  # what was generated is computed as a prompt
    assert _ids(bench.answer(turn)) == _cold(SPECS[kind], turn)


@EVERY
def test_together_equals_alone(kind: str) -> None:
    spec = SPECS[kind]
    bench = _bench(spec)
    streams = [bench.submit(prompt, client=str(n % 3)) for n, prompt in enumerate(PROMPTS)]
    bench.run()
    assert [_ids(collect(stream)) for stream in streams] == [_cold(spec, prompt) for prompt in PROMPTS]


@EVERY
def test_choices_and_seeds_equal_alone(kind: str) -> None:
    spec, options = SPECS[kind], {"n": 4, "sampling": {"temperature": 1.0}, "seed": 5}
    bench = _bench(spec)
    streams = [bench.submit(prompt, **options) for prompt in PROMPTS[:4]]
    bench.run()
    assert [_ids(collect(stream)) for stream in streams] == [_cold(spec, prompt, **options) for prompt in PROMPTS[:4]]


@EVERY
def test_preempted_equals_undisturbed(kind: str) -> None:
    spec = replace(SPECS[kind], pool_tokens=300)
    bench = _bench(spec)
    prompts = [_prompt(20 + n, 60 + 7 * n) for n in range(5)]
    streams = [bench.submit(prompt, max_tokens=60, client="one", ignore_eos=True) for prompt in prompts]
    bench.run()
    assert bench.scheduler.stats.n_preemptions > 0
    expected = [_cold(spec, prompt, max_tokens=60, ignore_eos=True) for prompt in prompts]
    assert [_ids(collect(stream)) for stream in streams] == expected


@pytest.mark.parametrize("kind", ["blocks", "one row", "window"])
def test_drafts_change_nothing(kind: str) -> None:
    spec = SPECS[kind]
    bench = _bench(spec, drafter=HalfRight())
    streams = [bench.submit(prompt) for prompt in PROMPTS]
    bench.run()
    assert [_ids(collect(stream)) for stream in streams] == [_cold(spec, prompt) for prompt in PROMPTS]
    stats = bench.scheduler.stats
    assert (stats.n_accepted_draft_tokens + stats.n_rejected_draft_tokens > 0) is (spec.exact_rows > 1)


@EVERY
@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_equal_alone(kind: str, seed: int) -> None:
    rng, spec = random.Random(seed), replace(SPECS[kind], pool_tokens=500, n_slots=6)
    bench = _bench(spec, config=RuntimeConfig(max_running=4))
    asked: list[tuple[TokenStream, list[int], dict[str, object]]] = []
    cancelled = set[int]()

    def feed(_: int) -> None:
        if len(asked) < 30 and rng.random() < 0.3:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 120)] + _prompt(rng.randint(0, 5), rng.randint(0, 40))
            options = {"n": rng.choice((1, 1, 2)), "cache": rng.choice(("on", "on", "pin", "off"))}
            asked.append((bench.submit(prompt, client=str(rng.randint(0, 2)), **options), prompt, options))
        if asked and rng.random() < 0.05:
            cancelled.add(rng.randrange(len(asked)))
            asked[max(cancelled)][0].cancel()
            cancelled.add(max(cancelled))

    while len(asked) < 30:
        feed(0)
        bench.step()
    bench.run(each_step=feed)
    for index, (stream, prompt, options) in enumerate(asked):
        if index not in cancelled:
            assert _ids(collect(stream)) == _cold(spec, prompt, n=options["n"]), (index, options)


def test_without_cuts_such_an_engine_gives_other_answers() -> None:
    spec = replace(SPECS["blocks"], cut_tokens=0, joins_blocks=False)  # the control
    bench = _bench(spec)
    streams = [bench.submit(prompt) for prompt in PROMPTS]
    bench.run()
    assert [_ids(collect(stream)) for stream in streams] != [_cold(spec, prompt) for prompt in PROMPTS]


@EVERY
def test_decoders_take_turns(kind: str) -> None:
    spec = SPECS[kind]
    bench = _bench(spec)
    for n in range(5):
        bench.submit(_prompt(n, 20), max_tokens=30, ignore_eos=True)
    bench.run()
    decodes = [batch for batch in bench.engine.batches if all(item.start >= 20 for item in batch.items)]
    slots = [[item.slot for item in batch.items] for batch in decodes]
    first = max(next(n for n, at in enumerate(slots) if slot in at) for at in slots for slot in at)
    assert {len(at) for at in slots[first : first + 10]} == {spec.exact_rows}
    counts = Counter(slot for at in slots[first : first + 10] for slot in at)
    assert len(counts) == 5
    assert max(counts.values()) - min(counts.values()) <= 1


@EVERY
def test_a_short_prompt_does_not_wait_for_anothers_long_one(kind: str) -> None:
    bench = _bench(SPECS[kind])
    long, short = bench.submit(_prompt(1, 1600), client="a"), bench.submit(_prompt(2, 40), client="b")
    for _ in range(40):
        bench.step()
    assert any(event.__class__.__name__ == "Token" for event in short._events)
    assert not any(event.__class__.__name__ == "Token" for event in long._events)
    bench.run()


def test_who_waited_longest_is_next_and_the_absent_are_forgotten() -> None:
    turns = Turns[str]()
    assert turns.order("abc") == ["a", "b", "c"]
    turns.take("a")
    turns.take("b")
    assert turns.order("abcd") == ["c", "d", "a", "b"]
    turns.take("c")
    assert turns.order("ca") == ["a", "c"]
    assert turns.order("bca") == ["b", "a", "c"]
