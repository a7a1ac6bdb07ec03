"""Each filter and penalty keeps what its plain reference keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localllm.runtime import truncation
from localllm.runtime.penalties import Dry, last, penalise_repeats
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.truncation import Candidates
from tests.runtime import reference_sampling as reference

# Quarters make ties; a second strategy has none.
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=40) | st.lists(
    st.integers(-30000, 30000).map(lambda n: n / 1009), min_size=1, max_size=40
)
UNIT = st.floats(0.01, 0.99)


def kept(left: Candidates) -> list[int]:
    return list(range(len(left))) if left.ids is None else left.ids.tolist()


def whole(logits: list[float]) -> Candidates:
    return Candidates(None, np.array(logits, dtype=np.float32))


def wanted(function: Callable[..., dict[int, float]], logits: list[float], value: float) -> list[int]:
    try:
        return list(function(dict(enumerate(logits)), value))
    except reference.NearBoundary:
        assume(False)
        raise


@pytest.mark.parametrize("name", ["top_n_sigma", "typical", "top_p", "min_p", "xtc"])
@given(logits=LOGITS, value=UNIT)
@settings(max_examples=150, deadline=None)
def test_filter_keeps_what_the_reference_keeps(name: str, logits: list[float], value: float) -> None:
    fast = getattr(truncation, name)(whole(logits), value)
    assert kept(fast) == wanted(getattr(reference, name), logits, value)


@given(logits=LOGITS, k=st.integers(1, 45))
@settings(max_examples=150, deadline=None)
def test_top_k_keeps_the_best_and_of_equals_the_lowest_ids(logits: list[float], k: int) -> None:
    left = whole(logits)
    assert truncation.best_positions(left.logits, k).tolist() == wanted(reference.top_k, logits, k)


@pytest.mark.parametrize("k", [1, 5, 40, 1000, 5000])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_top_k_of_a_long_row_equals_a_whole_sort(k: int, step: float) -> None:
    values = np.random.default_rng(3).normal(0, 3, 5000).astype(np.float32)
    if step:
        values = np.round(values / step) * np.float32(step)
    assert truncation.best_positions(values, k).tolist() == sorted(np.argsort(-values, kind="stable")[:k].tolist())


@pytest.mark.parametrize("mass", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("name", ["top_p", "typical"])
def test_mass_filters_of_a_long_row_keep_the_least_that_holds_the_mass(name: str, mass: float, spread: float) -> None:
    logits = np.random.default_rng(4).normal(0, spread, 6000).astype(np.float32)
    left = getattr(truncation, name)(Candidates(None, logits), mass)
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    rank = np.argsort(-p) if name == "top_p" else np.argsort(np.abs(-np.log(p) + (p * np.log(p)).sum()))
    n_wanted = int(np.searchsorted(np.cumsum(p[rank]), mass)) + 1
    assert abs(len(left) - n_wanted) <= 1
    assert set(kept(left)) - set(rank[: n_wanted + 1].tolist()) == set()


@given(
    logits=LOGITS,
    sampling=st.builds(
        Sampling,
        top_n_sigma=st.sampled_from([0.0, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 7]),
        typical_p=st.sampled_from([1.0, 0.7]),
        top_p=st.sampled_from([1.0, 0.83]),
        min_p=st.sampled_from([0.0, 0.07]),
        xtc_probability=st.sampled_from([0.0, 0.5]),
        xtc_threshold=st.just(0.13),
    ),
    xtc_draw=st.sampled_from([0.2, 0.8]),
)
@settings(max_examples=300, deadline=None)
def test_chain_works_in_its_documented_order(logits: list[float], sampling: Sampling, xtc_draw: float) -> None:
    acts = xtc_draw < sampling.xtc_probability
    try:
        expected = reference.truncate(dict(enumerate(logits)), sampling, xtc_acts=acts)
    except reference.NearBoundary:
        assume(False)
    left = truncation.truncate(np.array(logits, dtype=np.float32), sampling, xtc_draw)
    assert kept(left) == list(expected)


@pytest.mark.parametrize(
    "extreme",
    [
        Sampling(top_k=1),
        Sampling(top_p=0.0),
        Sampling(min_p=1.0),
        Sampling(typical_p=0.0),
        Sampling(top_n_sigma=1e-9),
        Sampling(xtc_probability=1.0, xtc_threshold=0.0),
    ],
)
def test_the_harshest_setting_leaves_a_token(extreme: Sampling) -> None:
    left = truncation.truncate(np.array([0.0, 2.0, 1.0, -np.inf], dtype=np.float32), extreme, 0.0)
    possible = [token for token in kept(left) if token != 3]
    assert possible == ([0] if extreme.xtc_probability else [1])


def test_banned_logits_do_not_widen_sigma() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0] + [-np.inf] * 50, dtype=np.float32)
    assert kept(truncation.top_n_sigma(Candidates(None, logits), 1.0)) == [2, 3]


@pytest.mark.parametrize("n", [1, 2, 100, 1024, 1025, 5000])
def test_pick_gives_each_weight_its_width(n: int) -> None:
    weights = np.random.default_rng(n).integers(0, 4, n).astype(np.float32)
    weights[n // 2] = 3
    ends = np.cumsum(weights, dtype=np.float64)
    for index in range(0, n, max(1, n // 97)):
        if weights[index]:
            assert truncation.pick(weights, (ends[index] - weights[index] / 2) / ends[-1]) == index
    assert weights[truncation.pick(weights, 0.0)] > 0
    assert weights[truncation.pick(weights, math.nextafter(1.0, 0.0))] > 0


def test_pick_never_takes_a_weightless_token() -> None:
    weights = np.zeros(3000, dtype=np.float32)
    weights[1234] = 1.0
    assert {truncation.pick(weights, u) for u in np.linspace(0, 0.9999999, 50)} == {1234}


@given(
    recent=st.lists(st.integers(0, 9), max_size=30),
    repeat=st.sampled_from([1.0, 1.3, 0.8]),
    presence=st.sampled_from([0.0, 0.5, -0.5]),
    frequency=st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=100, deadline=None)
def test_penalties_follow_their_formula(recent: list[int], repeat: float, presence: float, frequency: float) -> None:
    logits = np.linspace(-2, 2.5, 10).astype(np.float32)
    sampling = Sampling(repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency)
    expected = []
    for token, logit in enumerate(logits.tolist()):
        count = recent.count(token)
        if count:
            logit = logit / repeat if logit > 0 else logit * repeat
            logit -= presence + count * frequency
        expected.append(logit)
    penalise_repeats(logits, recent, sampling)
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)


PIECES = [b"a", b"b", b"c", b"\n", b"x:y", b"<", b"/p>", b"p", b"/", b">"]


@given(
    context=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]), max_size=40),
    allowed=st.integers(1, 4),
    breakers=st.sampled_from([(), ("\n", ":"), ("</p>",), ("\n", "</p>", "a<")]),
)
@settings(max_examples=300, deadline=None)
def test_dry_penalises_what_the_reference_does(context: list[int], allowed: int, breakers: tuple[str, ...]) -> None:
    sampling = Sampling(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=allowed, dry_sequence_breakers=breakers)
    logits = np.zeros(len(PIECES), dtype=np.float32)
    Dry(sampling, PIECES.__getitem__).penalise(logits, context)
    expected = reference.dry(context, sampling, PIECES)
    assert (-logits).tolist() == pytest.approx([expected.get(token, 0.0) for token in range(len(PIECES))], rel=1e-5)


def test_dry_of_an_endless_loop_stays_finite() -> None:
    sampling = Sampling(dry_multiplier=100.0, dry_base=100.0)
    logits = np.zeros(4, dtype=np.float32)
    Dry(sampling, lambda token: b"abcd"[token : token + 1]).penalise(logits, [0] * 5000)
    assert logits[0] < -1000
    assert np.isfinite(logits).all()


def test_last_gives_the_end_all_or_nothing() -> None:
    assert [last((1, 2, 3), n) for n in (2, 9, 0, -1)] == [(2, 3), (1, 2, 3), (), (1, 2, 3)]
