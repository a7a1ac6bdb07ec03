"""The sampler's promises: exact greedy, draws by name, drafts that change nothing, bans, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from localllm.errors import EngineError, UsageError
from localllm.runtime.draft.base import Draft
from localllm.runtime.draws import Draws, Purpose
from tests.runtime.sampling_helpers import OneOf, sampler

N_VOCAB = 50
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.8, "min_p": 0.05},
    {"top_k": 5, "top_p": 0.9},
    {"xtc_probability": 0.5},
    {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repeat_last_n": 4},
    {"repeat_penalty": 1.5, "repeat_last_n": -1},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "temperature": 0},
    {"temperature": 0, "repeat_penalty": 1.8, "dry_multiplier": 1.0},
]


def row(context: tuple[int, ...]) -> NDArray[np.float32]:
    """The fake model: logits that depend on the last two tokens."""
    rng = np.random.default_rng([*context[-2:], 7])
    return rng.normal(0, 2, N_VOCAB).astype(np.float32)


def plain(chooser: Any, prompt: tuple[int, ...], n: int) -> list[int]:
    context = prompt
    for position in range(n):
        context += (chooser.sample(row(context), position=position, context=context),)
    return list(context[len(prompt) :])


def test_greedy_is_argmax_with_the_lowest_id_on_ties() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0], dtype=np.float32)
    wishes = {"temperature": 0, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert sampler(4, **wishes).sample(logits, position=0, context=()) == 1


@pytest.mark.parametrize("wishes", WISHES, ids=str)
@given(seed=st.integers(0, 2**64 - 1), data=st.data())
@settings(max_examples=15, deadline=None)
def test_certain_drafts_give_the_tokens_of_a_run_without_drafts(wishes: dict[str, Any], seed: int, data: Any) -> None:
    prompt, n = (3, 1, 4, 1, 5), 12
    expected = plain(sampler(N_VOCAB, seed=seed, **wishes), prompt, n)
    chooser = sampler(N_VOCAB, seed=seed, **wishes)
    answer: list[int] = []
    while len(answer) < n:
        k = data.draw(st.integers(0, min(5, n - len(answer) - 1)))
        n_right = data.draw(st.integers(0, k))
        proposed = expected[len(answer) : len(answer) + k]
        proposed = [token if i < n_right else (token + 1) % N_VOCAB for i, token in enumerate(proposed)]
        context = prompt + tuple(answer)
        logits = np.stack([row(context + tuple(proposed[:i])) for i in range(k + 1)])
        accepted = chooser.accept(logits, Draft(tuple(proposed)), position=len(answer), context=context)
        assert len(accepted) == n_right + 1
        answer += accepted
    assert answer == expected


def test_greedy_with_q_equals_greedy_without() -> None:
    logits = np.array([[0.0, 2.0, 1.0], [1.0, 0.0, 0.5]], dtype=np.float32)
    q = np.array([[0.1, 0.2, 0.7]])
    chooser = sampler(3, temperature=0)
    assert chooser.accept(logits, Draft((2,), q), position=0, context=()) == [1]
    assert chooser.accept(logits, Draft((1,), q), position=0, context=()) == [1, 0]


def test_a_draft_like_the_target_is_always_accepted_whole() -> None:
    logits = np.random.default_rng(1).normal(0, 1, (4, N_VOCAB)).astype(np.float32)
    p = np.exp(logits[:3].astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    chooser = sampler(N_VOCAB)
    lengths = {len(chooser.accept(logits, Draft((7, 8, 9), p), position=4 * i, context=())) for i in range(200)}
    assert lengths == {4}


def test_a_drawn_token_depends_on_seed_choice_and_position_only() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    draw = [sampler(5000, seed=9, choice=2).sample(logits, position=i, context=()) for i in range(20)]
    chooser = sampler(5000, seed=9, choice=2)
    assert [chooser.sample(logits, position=i, context=(1, 2)) for i in reversed(range(20))] == draw[::-1]
    for seed, choice in ((10, 2), (9, 3)):
        other = sampler(5000, seed=seed, choice=choice)
        assert sum(other.sample(logits, position=i, context=()) == draw[i] for i in range(20)) <= 1


def test_uniforms_are_numpy_philox_blocks() -> None:
    seed, position = 2**63 + 12345, 17
    block = np.random.Philox(key=np.array([seed, 3], dtype=np.uint64), counter=[0, position, int(Purpose.ACCEPT), 0])
    assert Draws(seed, 3).uniform(position, Purpose.ACCEPT) == tuple(np.random.Generator(block).random(4).tolist())


def test_seeds_are_taken_modulo_64_bits() -> None:
    assert Draws(-1, 0).uniform(0, Purpose.SAMPLE) == Draws(2**64 - 1, 0).uniform(0, Purpose.SAMPLE)


def test_logits_and_context_are_not_changed() -> None:
    logits = np.linspace(-1, 1, N_VOCAB, dtype=np.float32)
    before, context = logits.copy(), [1, 2, 1, 2]
    chooser = sampler(
        N_VOCAB, repeat_penalty=1.3, dry_multiplier=1.0, logit_bias={3: 5}, min_tokens=9, temperature=0.5, top_p=0.9
    )
    chooser.sample(logits, position=0, context=context)
    chooser.accept(np.stack([logits] * 3), Draft((3, 3)), position=0, context=context)
    assert (logits == before).all()
    assert context == [1, 2, 1, 2]


def test_end_tokens_are_banned_before_min_tokens_and_always_with_ignore_eos() -> None:
    logits = np.array([9.0, 1.0, 2.0], dtype=np.float32)
    patient = sampler(3, temperature=0, min_tokens=2)
    assert [patient.sample(logits, position=i, context=()) for i in range(4)] == [2, 2, 0, 0]
    endless = sampler(3, temperature=0, ignore_eos=True)
    assert [endless.sample(logits, position=i, context=()) for i in (0, 1, 10**6)] == [2, 2, 2]


def test_bans_move_with_the_position_inside_a_draft() -> None:
    logits = np.array([[9.0, 1.0, 2.0]] * 3, dtype=np.float32)
    assert sampler(3, temperature=0, min_tokens=2).accept(logits, Draft((2, 2)), position=0, context=()) == [2, 2, 0]


def test_logit_bias_adds_to_the_logit_of_its_id() -> None:
    logits = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    assert sampler(3, temperature=0, logit_bias={"1": 1.5}).sample(logits, position=0, context=()) == 1
    assert sampler(3, temperature=0, logit_bias={2: -100}).sample(logits, position=0, context=()) == 1


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="logit_bias names token 3"):
        sampler(3, logit_bias={3: 1.0})


@pytest.mark.parametrize("bad", [[np.nan, 1.0, 0.0], [0.0, np.inf, 0.0], [-np.inf] * 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_are_an_engine_error(bad: list[float], temperature: int) -> None:
    with pytest.raises(EngineError):
        sampler(3, temperature=temperature).sample(np.array(bad, dtype=np.float32), position=0, context=())


def test_a_vocabulary_of_end_tokens_alone_cannot_ignore_them() -> None:
    with pytest.raises(EngineError):
        sampler(1, ignore_eos=True).sample(np.zeros(1, dtype=np.float32), position=0, context=())


def test_an_allowed_token_costs_no_mask() -> None:
    constraint = OneOf(3, {2}, {1})
    chooser = sampler(3, temperature=0)
    logits = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    assert chooser.sample(logits, position=0, context=(), constraint=constraint) == 2
    assert constraint.n_masks == 0
    assert chooser.sample(logits, position=1, context=(), constraint=constraint) == 1
    assert (constraint.n_masks, constraint.passed) == (1, [2, 1])


def test_a_constraint_follows_the_accepted_run_and_stops_the_draft() -> None:
    constraint = OneOf(3, {2}, {1}, {0, 1})
    logits = np.array([[0.0, 1.0, 2.0]] * 4, dtype=np.float32)
    accepted = sampler(3, temperature=0).accept(logits, Draft((2, 2, 2)), position=0, context=(), constraint=constraint)
    assert accepted == constraint.passed == [2, 1]


def test_a_constraint_that_allows_only_the_end_beats_min_tokens() -> None:
    logits = np.array([0.0, 1.0, 2.0], dtype=np.float32)
    chooser = sampler(3, min_tokens=5)
    assert chooser.sample(logits, position=0, context=(), constraint=OneOf(3, {0})) == 0


def test_a_constraint_without_a_way_on_is_an_error() -> None:
    with pytest.raises(EngineError, match="allows no token"):
        sampler(3).sample(np.zeros(3, dtype=np.float32), position=0, context=(), constraint=OneOf(3, set()))


def test_a_tiny_temperature_stays_finite() -> None:
    logits = np.array([0.0, 5.0, 4.999], dtype=np.float32)
    assert {sampler(3, temperature=1e-4).sample(logits, position=i, context=()) for i in range(50)} == {1}
    assert sampler(3, temperature=1e-300).sample(logits, position=0, context=()) == 1


def test_a_cut_draft_keeps_its_rows() -> None:
    draft = Draft((1, 2, 3), np.ones((3, 4)))
    assert len(draft.cut(2)) == 2
    assert np.shape(draft.cut(2).q) == (2, 4)
    assert draft.cut(5) is draft
