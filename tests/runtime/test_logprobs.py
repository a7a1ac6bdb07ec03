"""Log-probabilities of the raw logits: exact, finite, ordered, at most 1 in all (B26)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.logprobs import FLOOR, logprobs
from tests.runtime.sampling_helpers import Letters


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32) | st.just(-math.inf), min_size=1, max_size=40).filter(
        lambda values: max(values) > -math.inf
    ),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_values_are_a_log_softmax_and_sum_to_one_at_most(logits: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    n_top = data.draw(st.integers(0, len(logits)))
    got = logprobs(np.array(logits, dtype=np.float32), token, n_top, Letters(len(logits)))
    best = max(logits)
    log_sum = math.log(math.fsum(math.exp(x - best) for x in logits))
    every = [got, *got.top]
    for entry in every:
        assert entry.logprob == pytest.approx(max(logits[entry.id] - best - log_sum, FLOOR), abs=1e-9)
        assert FLOOR <= entry.logprob <= 0
    assert len(got.top) == n_top
    assert sum(math.exp(entry.logprob) for entry in {e.id: e for e in every}.values()) <= 1
    assert [e.id for e in got.top] == sorted(range(len(logits)), key=lambda i: (-np.float32(logits[i]), i))[:n_top]


def test_the_whole_vocabulary_sums_to_one_at_most() -> None:
    logits = np.random.default_rng(2).normal(0, 4, 20_000).astype(np.float32)
    got = logprobs(logits, 0, 20_000, Letters(20_000))
    assert 1 - 1e-9 < sum(math.exp(entry.logprob) for entry in got.top) <= 1


def test_raw_holds_the_bytes_of_a_piece_that_is_no_text() -> None:
    class Cut(Letters):
        def piece(self, token: int) -> bytes:
            return (b"\xf0\x9f", b"\xa6\x8a")[token]

    got = logprobs(np.array([0.0, 1.0], dtype=np.float32), 0, 2, Cut(2))
    assert got.raw == b"\xf0\x9f"
    assert [entry.raw for entry in got.top] == [b"\xa6\x8a", b"\xf0\x9f"]


def test_an_impossible_token_has_the_floor_and_not_minus_infinity() -> None:
    got = logprobs(np.array([-np.inf, 0.0], dtype=np.float32), 0, 2, Letters(2))
    assert got.logprob == FLOOR
    assert got.top[1].logprob == FLOOR


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_not_numbers_give_the_floor(bad: list[float]) -> None:
    assert logprobs(np.array(bad, dtype=np.float32), 1, 0, Letters(2)).logprob == FLOOR


def test_logits_are_not_changed() -> None:
    logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    logprobs(logits, 1, 2, Letters(3))
    assert logits.tolist() == [1.0, 2.0, 3.0]
