"""The whole runtime on tiny random models of ten architectures: any schedule, one answer.

Driven by token ids (their tokenizer is a stub), with F32 KV and flash attention off, where batch
shapes move logits by 1e-5 at most, so greedy answers are equal or something is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm.backends import registry
from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.placement import place
from localllm.models.info import read_info
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.draft.base import Draft, Drafted
from localllm.runtime.engine import PrefixRule
from localllm.runtime.events import Admitted
from localllm.runtime.stream import TokenStream, collect
from tests.runtime.harness import Bench
from tests.tiny_models import TINY


@pytest.fixture(params=TINY)
def path(request: pytest.FixtureRequest, tiny: Path) -> Path:
    """One of the tiny models."""
    return tiny / f"{request.param}.gguf"


def _engine(path: Path, n_ctx: int = 768, parallel: int = 4, retained: int = 3) -> LlamaEngine:
    info = read_info(path)
    config = LoadConfig(
        ctx=n_ctx,
        kv=KvTypes("f32", "f32"),
        flash_attn="off",
        gpu="off",
        threads=1,
        parallel=parallel,
        retained=retained,
    )
    placement = place(info, registry.machine(), config)
    return registry.open_engine(registry.load_model(info, placement), placement)


class Opened:
    """A bench over a real engine, closed at the end."""

    def __init__(self, engine: LlamaEngine, **settings: object) -> None:
        self.engine = engine
        self.bench = Bench(engine, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> Bench:
        return self.bench

    def __exit__(self, *exc: object) -> None:
        self.engine.close()


def _prompts(seed: int, n: int, shortest: int = 5, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(3, 127) for _ in range(rng.randint(shortest, longest))] for _ in range(n)]


def _submit(bench: Bench, prompts: Sequence[Sequence[int]], **options: object) -> list[TokenStream]:
    return [bench.submit(p, **{"max_tokens": 12, "ignore_eos": True, **options}) for p in prompts]


def _ids(streams: Sequence[TokenStream]) -> list[tuple[int, ...]]:
    return [collect(s).choices[0].ids for s in streams]


def _alone(path: Path, prompts: Sequence[Sequence[int]], **options: object) -> list[tuple[int, ...]]:
    """Each prompt by itself on an engine that holds nothing else."""
    answers = []
    for prompt in prompts:
        with Opened(_engine(path, n_ctx=256, parallel=1, retained=0)) as bench:
            streams = _submit(bench, [prompt], **options)
            bench.run()
            answers += _ids(streams)
    return answers


def test_batched_and_preempted_and_chunked_equal_alone(path: Path) -> None:
    prompts = _prompts(1, 4, shortest=60)
    expected = _alone(path, prompts, max_tokens=24)
    with Opened(_engine(path)) as bench:
        streams = _submit(bench, prompts, max_tokens=24)
        bench.run()
        assert _ids(streams) == expected
    config = RuntimeConfig(itl_target_s=1e-9, min_chunk_tokens=7)
    with Opened(_engine(path), config=config) as bench:
        streams = [*_submit(bench, prompts[:1], max_tokens=24)]
        bench.step()
        streams += _submit(bench, prompts[1:], max_tokens=24)
        for n in range(400):
            bench.step()
            if n in (9, 20) and len(bench.scheduler._running) > 1:
                bench.scheduler._shortage.give_way()  # what the no-room table does last
            if bench.scheduler.is_idle:
                break
        assert bench.scheduler.stats.n_preemptions > 0
        assert _ids(streams) == expected


def test_copied_and_taken_over_prefixes_equal_computed(path: Path) -> None:
    shared = _prompts(2, 1, shortest=80)[0]
    prompts = [[*shared, 5, 6, 7], [*shared, 9], [*shared[:50], 11, 12]]
    expected = _alone(path, [shared, *prompts])
    with Opened(_engine(path)) as bench:
        answers, cached = [], []
        for prompt in (shared, *prompts, shared):
            stream = bench.submit(prompt, max_tokens=12, ignore_eos=True)
            bench.run()
            events = list(stream)
            cached.append(next(e.cached_tokens["device"] for e in events if isinstance(e, Admitted)))
            answers.append(collect(events).choices[0].ids)
        assert answers == [*expected, expected[0]]
        assert cached[0] == 0
        assert cached[-1] == len(shared) - 1
        cuttable = bench.engine.spec.prefix_rule is not PrefixRule.CHECKPOINT
        assert (cached[1] == len(shared)) == cuttable or cached[1] == len(shared) - 1


def test_next_turn_reuses_the_conversation(path: Path) -> None:
    first = _prompts(3, 1, shortest=60)[0]
    with Opened(_engine(path)) as bench:
        answer = bench.answer(first, max_tokens=12, ignore_eos=True)
        turn = [*first, *answer.choices[0].ids, 8, 9, 10]
        second = bench.answer(turn, max_tokens=12, ignore_eos=True)
    assert second.usage.cached_tokens["device"] == len(turn) - 4
    assert [second.choices[0].ids] == _alone(path, [turn])


class Replay:
    """Drafts the known answer, wrong at every third token."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._whole = [prompt + answer for prompt, answer in answers.items()]

    def propose(self, sequences: Sequence[Drafted], budget: int) -> list[Draft]:
        """Draft three tokens of the answer that the sequence is on its way to."""
        return [self._draft(tuple(s.tokens)) for s in sequences]

    def accepted(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def forget(self, sequence: Drafted) -> None:
        """Keep nothing."""

    def _draft(self, tokens: tuple[int, ...]) -> Draft:
        whole = next(w for w in self._whole if w[: len(tokens)] == tokens)
        guess = whole[len(tokens) : len(tokens) + 3]
        return Draft(tuple(t if (len(tokens) + i) % 3 else (t + 1) % 100 + 3 for i, t in enumerate(guess)))


def test_drafted_equals_plain_where_the_engine_can_roll_back(path: Path) -> None:
    prompts = _prompts(4, 3)
    expected = _alone(path, prompts, max_tokens=24)
    drafter = Replay({tuple(p): a for p, a in zip(prompts, expected, strict=True)})
    with Opened(_engine(path), drafter=drafter) as bench:
        streams = _submit(bench, prompts, max_tokens=24)
        bench.run()
        assert _ids(streams) == expected
        may_draft = bench.engine.spec.max_rollback_tokens != 0
        assert (bench.scheduler.stats.n_rejected_draft_tokens > 0) == may_draft


def test_a_wrong_draft_check_would_be_seen(tiny: Path) -> None:
    """The control: leaving out the rollback changes the answer."""
    path = tiny / "llama-dense.gguf"
    prompts = _prompts(5, 1)
    expected = _alone(path, prompts, max_tokens=24)
    drafter = Replay({tuple(prompts[0]): expected[0]})
    with Opened(_engine(path), drafter=drafter) as bench:
        room = bench.scheduler._room
        room.edits.roll_back = room.slots.cut  # type: ignore[method-assign]
        stream = bench.submit(prompts[0], max_tokens=24, ignore_eos=True)
        bench.run()
        ids: tuple[int, ...] | None
        try:
            ids = collect(stream).choices[0].ids
        except Exception:
            ids = None  # the guard refused the step
        assert ids != expected[0]


def test_choices_of_one_request_compute_the_prompt_once(path: Path) -> None:
    prompt = _prompts(6, 1, shortest=70)[0]
    with Opened(_engine(path)) as bench:
        answer = bench.answer(prompt, n=3, max_tokens=8, ignore_eos=True)
        assert len({c.ids for c in answer.choices}) == 1
        assert bench.scheduler.stats.n_prompt_tokens_computed <= len(prompt) + 2
    assert [answer.choices[0].ids] == _alone(path, [prompt], max_tokens=8)
