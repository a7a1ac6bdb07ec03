"""Reported faults of one kind: an answer depends on what was cached before. Over HTTP, on the fake engine.

Its next token is a hash of what is really in its cache, so any wrong cell changes the text.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.kv.blocks import Chain, KeyMaker
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Tiers
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import truth
from tests.server.fakes import Running, fake_supervisor, serving

POOL_TOKENS = 512
N_GEN = 8


def engine_of(pool_tokens: int = POOL_TOKENS) -> FakeEngine:
    """Return an engine whose rows take time: a tier that is slower than computing is not asked."""
    spec = replace(SPEC, pool_tokens=pool_tokens, max_sequence_tokens=pool_tokens)
    return FakeEngine(spec, on_forward=lambda batch: time.sleep(5e-5 * batch.n_rows))


@contextmanager
def server(folder: Path | None = None, engine: FakeEngine | None = None) -> Iterator[Running]:
    """Serve a fake engine whose pool holds two prompts of 200 tokens; with a folder, that is its disk tier."""
    disk = {"disk_dir": str(folder), "disk_bytes": 1 << 26, "flush_s": 10.0, "keeps_all": True} if folder else {}
    tiers = TierConfig(ram_bytes=1 << 24, block_tokens=16, **disk)  # type: ignore[arg-type]
    with serving(fake_supervisor(engine or engine_of(), config=RuntimeConfig(tiers=tiers))) as running:
        yield running


def prompt_of(rng: random.Random, n_tokens: int = 200) -> list[int]:
    return [rng.randint(32, 126) for _ in range(n_tokens)]


def right(prompt: Sequence[int]) -> str:
    """Return the answer of an empty cache."""
    return bytes(truth(prompt, N_GEN)).decode()


def ask(running: Running, prompt: Sequence[int], **body: Any) -> tuple[str, int]:
    """Return text and cached tokens."""
    sent = {"prompt": list(prompt), "max_tokens": N_GEN, **body}
    answer = running.post("/v1/completions", sent).json
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def all_at_once(running: Running, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    threads = [threading.Thread(target=lambda i=i, p=p: found.update({i: ask(running, p)})) for i, p in
               enumerate(prompts)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[i] for i in range(len(prompts))]


def from_tier(running: Running, tier: str) -> int:
    return int(getattr(running.worker.service.stats(), f"n_prompt_tokens_{tier}"))


def test_b15_repeats_that_come_back_from_ram_are_answered_as_if_cold() -> None:
    rng = random.Random(15)
    prompt = prompt_of(rng)
    with server() as running:
        for _ in range(3):
            text, n_cached = ask(running, prompt)
            assert text == right(prompt)
            for _ in range(3):  # each fills half of the pool
                ask(running, prompt_of(rng))
        assert n_cached == len(prompt) - 1
        assert from_tier(running, "ram") >= 2 * (len(prompt) - 1)
        assert ask(running, prompt[:77]) == (right(prompt[:77]), 76)
        assert ask(running, prompt[:1]) == (right(prompt[:1]), 0)


def test_b15_repeats_that_come_back_from_disk_are_answered_as_if_cold(tmp_path: Path) -> None:
    prompt = prompt_of(random.Random(16))
    with server(tmp_path) as running:
        assert ask(running, prompt) == (right(prompt), 0)
    with server(tmp_path) as running:
        for _ in range(3):
            assert ask(running, prompt) == (right(prompt), len(prompt) - 1)
        assert from_tier(running, "disk") == len(prompt) - 1
    with server(tmp_path) as running:
        assert ask(running, prompt[:77]) == (right(prompt[:77]), 76)


ROOTS = [
    ("", ""),
    ("a1@1.0", ""),
    ("a1@0.5", ""),
    ("a2@1.0", ""),
    ("a1@1.0,a2@1.0", ""),
    ("", "a1@1.0"),
    ("a1@1", ".0"),
]


def test_b18_other_adapters_scales_or_salts_have_no_key_in_common() -> None:
    maker, tokens = KeyMaker("fake", b"s" * 32, 16), list(range(40))
    chains = [Chain(maker, root) for root in ROOTS]
    blocks = [[chain.block(tokens, start, min(start + 16, 40)) for start in (0, 16, 32)] for chain in chains]
    names = [block.key for of in blocks for block in of]
    assert len(set(names)) == len(ROOTS) * 3
    assert [a[0].n_common(b[0].marks) for a in blocks for b in blocks if a is not b] == [0] * (len(ROOTS) * 6)
    again = Chain(maker, ROOTS[1])
    assert [again.block(tokens, start, min(start + 16, 40)) for start in (0, 16, 32)] == blocks[1]


def test_b18_a_block_of_one_adapter_is_never_offered_to_another() -> None:
    tiers = Tiers(TierConfig(ram_bytes=1 << 20, block_tokens=16), spec=SPEC)
    tokens = list(range(40))
    own = tiers.look_up(ROOTS[1], tokens)
    tiers.put(own.chain.block(tokens, 0, 16), b"of the first adapter", Note(40, False, False))
    assert [link.n_used for link in tiers.match(tiers.look_up(ROOTS[1], tokens), tokens, 39)] == [16]
    for root in ROOTS[:1] + ROOTS[2:]:
        assert tiers.match(tiers.look_up(root, tokens), tokens, 39) == ()
    tiers.close()


def test_b21_equal_requests_at_once_have_one_answer_wherever_their_prefix_comes_from(tmp_path: Path) -> None:
    rng = random.Random(21)
    prompt = prompt_of(rng, 120)
    answers = set()
    for _ in range(3):
        with server(tmp_path) as running:
            for _ in range(4):
                answers |= {text for text, _ in all_at_once(running, [prompt] * 8)}
                others = [prompt_of(rng, 90) for _ in range(4)]
                assert [text for text, _ in all_at_once(running, others)] == [right(other) for other in others]
    assert answers == {right(prompt)}
    assert from_tier(running, "disk") > 0


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_depends_on_what_was_cached_before(seed: int, tmp_path: Path) -> None:
    """Repeats, prefixes, edits and branches of a few prompts, at random, alone and at once, over restarts."""
    rng = random.Random(seed)
    family = [prompt_of(rng, rng.randint(60, 200)) for _ in range(4)]

    def draw() -> list[int]:
        prompt = list(rng.choice(family))
        match rng.randrange(5):
            case 0:
                return prompt
            case 1:
                return prompt[: rng.randint(1, len(prompt))]
            case 2:
                prompt[rng.randrange(len(prompt))] = rng.randint(32, 126)
                return prompt
            case 3:
                return prompt + prompt_of(rng, rng.randint(1, 40))
            case _:
                at = rng.randrange(1, len(prompt))
                return prompt[:at] + rng.choice(family)[:40]

    n_cached = 0
    for _ in range(2):
        with server(tmp_path) as running:
            for _ in range(12):
                prompts = [draw() for _ in range(rng.choice((1, 1, 4)))]
                answers = all_at_once(running, prompts)
                assert [text for text, _ in answers] == [right(prompt) for prompt in prompts]
                assert all(0 <= n < len(prompt) for prompt, (_, n) in zip(prompts, answers, strict=True))
                n_cached += sum(n for _, n in answers)
    assert n_cached > 500


def test_details_of_an_answer_do_not_depend_on_what_was_cached_before() -> None:
    def choices(running: Running, prompt: Sequence[int], n: int) -> list[Any]:
        body = {"prompt": list(prompt), "max_tokens": N_GEN, "n": n, "logprobs": 3}
        told: list[Any] = running.post("/v1/completions", body).json["choices"]
        return told

    rng = random.Random(3)
    prompt = prompt_of(rng)
    with server() as running:
        cold = choices(running, prompt, 1)
        for _ in range(2):
            (first, second) = choices(running, prompt, 2)
            assert first == cold[0]
            assert {**second, "index": 0} == cold[0]
            for _ in range(3):
                ask(running, prompt_of(rng))
        assert from_tier(running, "ram") > 0


def test_a_request_without_cache_uses_nothing_and_leaves_nothing() -> None:
    prompt = prompt_of(random.Random(4))
    with server() as running:
        assert ask(running, prompt, cache="off") == (right(prompt), 0)
        assert ask(running, prompt) == (right(prompt), 0)
        assert ask(running, prompt, cache="off") == (right(prompt), 0)
        assert ask(running, prompt) == (right(prompt), len(prompt) - 1)


def test_control_one_wrong_cell_changes_the_answer() -> None:
    """What all of the above would see."""
    prompt, engine = prompt_of(random.Random(5)), engine_of()
    with server(engine=engine) as running:
        ask(running, prompt)
        held = next(slot for slot in engine.slots if slot.tokens[: len(prompt)] == prompt)
        held.tokens[50] = (held.tokens[50] - 31) % 95 + 32
        assert ask(running, prompt)[0] != right(prompt)
