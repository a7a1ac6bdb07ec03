"""A request is known again by what became of it, and suspects run alone or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.errors import Poisoned
from localllm.runtime.prepare import prepare
from localllm.runtime.sequence import RequestRun
from localllm.runtime.stream import TokenStream
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationOptions, Request
from localllm.worker.gate import FINGERPRINT_BYTES, Gate, fingerprint
from localllm.worker.poison import KEPT_S
from tests.fake_engine import SPEC, FakeEngine, fake_parts

KEY = b"k" * 32
_, FACTS = fake_parts(FakeEngine())
OPTIONS = GenerationOptions(max_tokens=5, seed=3, stop=("x",), sampling={"top_k": 4, "temperature": 0.5})
BASE = CompletionRequest("a prompt", OPTIONS)


def run_of(request: Request) -> RequestRun:
    return prepare(request, FACTS, SPEC, TokenStream(request.request_id, lambda stream: None))


def print_of(request: Request, key: bytes = KEY) -> bytes:
    return fingerprint(run_of(request), request.options, key)


def test_the_same_request_from_anyone_has_the_same_fingerprint() -> None:
    again = replace(BASE, request_id="another", options=replace(OPTIONS, client="someone", priority=7))
    assert print_of(again) == print_of(BASE)
    assert len(print_of(BASE)) == FINGERPRINT_BYTES


def test_the_order_of_settings_does_not_matter() -> None:
    turned = replace(BASE, options=replace(OPTIONS, sampling={"temperature": 0.5, "top_k": 4}))
    assert print_of(turned) == print_of(BASE)


def test_ids_and_the_text_they_come_from_are_one_request() -> None:
    ids = tuple(FACTS.tokenizer.encode("a prompt", parse_special=True, add_bos=True))
    assert print_of(replace(BASE, prompt=ids)) == print_of(BASE)
    assert print_of(ChatRequest(({"role": "user", "content": "a prompt"},), OPTIONS)) != print_of(BASE)


def test_texts_to_embed_are_told_apart_from_a_prompt_and_from_each_other() -> None:
    ids = (256, 97, 98)
    as_prompt = print_of(CompletionRequest(ids))
    whole, cut = print_of(EmbeddingRequest((ids,))), print_of(EmbeddingRequest((ids[:1], ids[1:])))
    assert len({as_prompt, whole, cut}) == 3


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, prompt="another prompt"),
        *(
            replace(BASE, options=replace(OPTIONS, **change))
            for change in (
                {"max_tokens": 6},
                {"seed": 4},
                {"seed": None},
                {"stop": ("y",)},
                {"stop": ()},
                {"n": 2},
                {"logprobs": 1},
                {"min_tokens": 1},
                {"ignore_eos": True},
                {"sampling": {"top_k": 5, "temperature": 0.5}},
                {"sampling": {"top_k": 4}},
            )
        ),
    ],
)
def test_whatever_changes_the_work_changes_the_fingerprint(other: Request) -> None:
    assert print_of(other) != print_of(BASE)


def test_a_request_without_a_seed_is_known_again_although_it_draws_another() -> None:
    unseeded = replace(BASE, options=replace(OPTIONS, seed=None))
    first, second = run_of(unseeded), run_of(unseeded)
    assert first.seed != second.seed
    assert fingerprint(first, unseeded.options, KEY) == fingerprint(second, unseeded.options, KEY)


def test_without_the_key_a_fingerprint_tells_nothing() -> None:
    assert print_of(BASE) != print_of(BASE, b"z" * 32)


def test_a_suspect_runs_alone_and_a_proven_one_not_at_all() -> None:
    found = print_of(BASE)
    free, alone, refused = run_of(BASE), run_of(BASE), run_of(BASE)
    assert Gate(KEY).judge(free, OPTIONS) == found
    assert not free.is_lone
    assert Gate(KEY, lone=[found]).judge(alone, OPTIONS) == found
    assert alone.is_lone
    with pytest.raises(Poisoned) as caught:
        Gate(KEY, lone=[found], refused=[found]).judge(refused, OPTIONS)
    assert "a prompt" not in caught.value.message + caught.value.hint


def test_suspicion_ends_with_its_time_in_a_worker_that_goes_on() -> None:
    now_s, found = [100.0], print_of(BASE)
    gate = Gate(KEY, lone=[found], refused=[found], clock=lambda: now_s[0])
    now_s[0] += KEPT_S - 1
    with pytest.raises(Poisoned):
        gate.judge(run_of(BASE), OPTIONS)
    now_s[0] += 2
    later = run_of(BASE)
    gate.judge(later, OPTIONS)
    assert not later.is_lone
