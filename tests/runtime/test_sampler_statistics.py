"""Drawn tokens against the distribution they must follow: chi-square, fixed seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from localllm.runtime.draft.base import Draft
from localllm.runtime.draws import Draws, Purpose
from localllm.runtime.sampling_params import Sampling, resolve
from tests.runtime import reference_sampling as reference
from tests.runtime.sampling_helpers import OneOf, sampler

N_DRAWS = 6_000
LOGITS = [1.3, 0.2, 2.1, -0.4, 1.9, 0.7, -1.5, 2.0]
NEXT = [0.1, 1.4, -0.3, 0.9, 0.3, -2.0, 1.1, 0.5]
ROWS = np.array([LOGITS, NEXT], dtype=np.float32)
CHAINS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8, "temperature": 1.7},
    {"min_p": 0.3},
    {"typical_p": 0.75},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.4, "xtc_threshold": 0.15},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "xtc_probability": 0.3, "temperature": 0.8},
]


def p_value(drawn: Counter[int], target: dict[int, float]) -> float:
    """The chi-square p-value; 0 where a token of no probability was drawn."""
    if any(target[token] <= 1e-12 for token in drawn):
        return 0.0
    possible = [token for token, p in target.items() if p > 1e-12]
    total = sum(drawn.values())
    scale = total / sum(target[token] for token in possible)
    return float(chisquare([drawn[t] for t in possible], [target[t] * scale for t in possible]).pvalue)


def restricted(target: dict[int, float], allowed: set[int]) -> dict[int, float]:
    total = sum(p for token, p in target.items() if token in allowed)
    return {token: p / total if token in allowed else 0.0 for token, p in target.items()}


def target_of(logits: list[float], wishes: dict[str, Any]) -> dict[int, float]:
    return reference.target(logits, resolve(Sampling(), wishes))


@pytest.mark.parametrize("wishes", CHAINS, ids=lambda wishes: "+".join(wishes) or "plain")
def test_samples_follow_the_truncated_distribution(wishes: dict[str, Any]) -> None:
    chooser = sampler(8, seed=11, **wishes)
    drawn = Counter(chooser.sample(ROWS[0], position=i, context=()) for i in range(N_DRAWS))
    assert p_value(drawn, target_of(LOGITS, wishes)) > 1e-3


def drafted(chooser: Any, q: list[float], rule: Any) -> tuple[Counter[int], Counter[int]]:
    """Draft one token from q at every position; return the first tokens and those after an accepted one."""
    draws = Draws(5, 0)
    ends = np.cumsum(q)
    first: Counter[int] = Counter()
    after: Counter[int] = Counter()
    for i in range(N_DRAWS):
        proposed = int(np.searchsorted(ends, draws.uniform(2 * i, Purpose.DRAFT)[0] * ends[-1], side="right"))
        accepted = rule(chooser, proposed, 2 * i)
        first[accepted[0]] += 1
        if len(accepted) == 2:
            after[accepted[1]] += 1
    return first, after


Q = [0.05, 0.3, 0.1, 0.2, 0.05, 0.1, 0.15, 0.05]


@pytest.mark.parametrize("wishes", CHAINS, ids=lambda wishes: "+".join(wishes) or "plain")
def test_drafts_with_q_keep_the_distribution(wishes: dict[str, Any]) -> None:
    q = np.array([Q])

    def rule(chooser: Any, proposed: int, position: int) -> list[int]:
        return chooser.accept(ROWS, Draft((proposed,), q), position=position, context=())

    first, after = drafted(sampler(8, seed=5, **wishes), Q, rule)
    assert p_value(first, target_of(LOGITS, wishes)) > 1e-3
    assert sum(after.values()) > 200
    assert p_value(after, target_of(NEXT, wishes)) > 1e-3


def test_control_accepting_without_q_is_caught() -> None:
    """The test above must fail for a rule that is wrong: accepted wherever the target allows it at all."""

    def rule(chooser: Any, proposed: int, position: int) -> list[int]:
        chosen = chooser.sample(ROWS[0], position=position, context=())
        return [proposed if position % 3 == 0 else chosen]

    first, _ = drafted(sampler(8, seed=5), Q, rule)
    assert p_value(first, target_of(LOGITS, {})) < 1e-6


@pytest.mark.parametrize("wishes", CHAINS, ids=lambda wishes: "+".join(wishes) or "plain")
def test_certain_drafts_keep_the_distribution(wishes: dict[str, Any]) -> None:
    def rule(chooser: Any, proposed: int, position: int) -> list[int]:
        return chooser.accept(ROWS, Draft((proposed,)), position=position, context=())

    first, after = drafted(sampler(8, seed=5, **wishes), Q, rule)
    assert p_value(first, target_of(LOGITS, wishes)) > 1e-3
    assert p_value(after, target_of(NEXT, wishes)) > 1e-3


@pytest.mark.parametrize("wishes", CHAINS, ids=lambda wishes: "+".join(wishes) or "plain")
def test_a_constraint_restricts_the_truncated_distribution(wishes: dict[str, Any]) -> None:
    allowed = {0, 4, 5, 7}
    constraint = OneOf(8, allowed)
    chooser = sampler(8, seed=13, **wishes)
    drawn = Counter(chooser.sample(ROWS[0], position=i, context=(), constraint=constraint) for i in range(N_DRAWS))
    expected = dict.fromkeys(range(8), 0.0)
    sampling = resolve(Sampling(), wishes)
    for acts, share in ((False, 1 - sampling.xtc_probability), (True, sampling.xtc_probability)):
        kept = reference.truncate(dict(enumerate(LOGITS)), sampling, xtc_acts=acts) if share else {}
        if not kept.keys() & allowed:  # nothing left of the truncated set: mask first, truncate after
            kept = {t: x for t, x in enumerate(LOGITS) if t in allowed} if share else {}
            kept = reference.truncate(kept, sampling, xtc_acts=acts) if share else {}
        if share:
            p = restricted(reference.probabilities(kept, sampling.temperature), allowed)
            for token, value in p.items():
                expected[token] += share * value
    assert p_value(drawn, expected) > 1e-3


def test_nothing_allowed_in_the_truncated_set_means_mask_first_truncate_after() -> None:
    allowed = {1, 3, 6}
    wishes = {"top_k": 2}
    chooser = sampler(8, seed=13, **wishes)
    constraint = OneOf(8, allowed)
    drawn = Counter(chooser.sample(ROWS[0], position=i, context=(), constraint=constraint) for i in range(N_DRAWS))
    masked = {t: x for t, x in enumerate(LOGITS) if t in allowed}
    kept = reference.truncate(masked, resolve(Sampling(), wishes))
    expected = {**dict.fromkeys(range(8), 0.0), **reference.probabilities(kept)}
    assert set(drawn) == {1, 3}
    assert p_value(drawn, expected) > 1e-3


@pytest.mark.parametrize("certain", [True, False])
def test_constrained_drafts_keep_the_restricted_distribution(certain: bool) -> None:
    """Drafts come trimmed to what the constraint allows, so q is restricted too."""
    sets = {0, 2, 5, 7}, {1, 3, 4}
    q = [p if token in sets[0] else 0.0 for token, p in enumerate(Q)]
    q = [p / sum(q) for p in q]
    wishes = {"top_k": 6, "temperature": 0.9}

    def rule(chooser: Any, proposed: int, position: int) -> list[int]:
        draft = Draft((proposed,), None if certain else np.array([q]))
        return chooser.accept(ROWS, draft, position=position, context=(), constraint=OneOf(8, *sets))

    first, after = drafted(sampler(8, seed=5, **wishes), q, rule)
    assert p_value(first, restricted(target_of(LOGITS, wishes), sets[0])) > 1e-3
    assert p_value(after, restricted(target_of(NEXT, wishes), sets[1])) > 1e-3


def test_draws_are_uniform_and_independent_between_purposes() -> None:
    draws = Draws(3, 1)
    values = np.array([[draws.uniform(i, purpose)[0] for purpose in Purpose] for i in range(20_000)])
    cells = (values * 4).astype(int)
    counts = np.bincount(cells @ np.array([16, 4, 1]), minlength=64)
    assert chisquare(counts).pvalue > 1e-3
