from __future__ import annotations

import numpy as np
import pytest

from localllm.bench.client.latencies import (
    answer_ttft_ms,
    distribution,
    e2e_ms,
    itl_ms,
    latencies_ms,
    queue_ms,
    tpot_ms,
    ttft_ms,
)
from localllm.bench.measures import LATENCIES, STATISTICS
from tests.bench.client.made_up import outcome


def test_latencies_count_from_when_a_request_was_due() -> None:
    found = outcome(token_s=(10.5, 10.75, 11.5), answer_s=10.75, completion_tokens=4)
    assert ttft_ms(found) == pytest.approx(500)
    assert answer_ttft_ms(found) == pytest.approx(750)
    assert e2e_ms(found) == pytest.approx(2000)
    assert itl_ms(found) == pytest.approx([250, 750])
    assert tpot_ms(found) == pytest.approx(1000 / 3)  # by the server's count


def test_the_pace_is_by_the_count_that_is_given() -> None:
    found = outcome(token_s=(10.5, 11.5), completion_tokens=2)
    assert tpot_ms(found, 6) == pytest.approx(200)
    assert tpot_ms(outcome(token_s=(10.5, 11.0, 11.5))) == pytest.approx(500)  # nobody counts: one a piece


def test_pieces_that_came_together_are_one() -> None:
    assert itl_ms(outcome(token_s=(10.5, 10.5, 11.0))) == pytest.approx([500])


def test_one_token_or_one_piece_has_no_pace() -> None:
    assert tpot_ms(outcome(token_s=(10.5,))) is None
    assert tpot_ms(outcome(token_s=(10.5,), completion_tokens=7)) is None
    assert tpot_ms(outcome(token_s=(10.5, 11.0), completion_tokens=1)) is None
    assert ttft_ms(outcome()) is None
    assert answer_ttft_ms(outcome(token_s=(10.5,))) is None  # only a thought


ODD = [{"queue_ms": value} for value in (-1.0, 4e300, float("nan"), float("inf"))]


@pytest.mark.parametrize("timings", [None, {}, {"queue_ms": "7"}, {"queue_ms": True}, {"queue_ms": 10**400}, *ODD])
def test_no_queue_is_told_where_the_server_tells_none(timings: dict[str, object] | None) -> None:
    assert queue_ms(outcome(timings=timings)) is None


def test_each_latency_of_a_request_is_found_by_its_name() -> None:
    found = latencies_ms(outcome(token_s=(10.5, 11.0), answer_s=11.0, timings={"queue_ms": 7}), 2)
    assert found.keys() == LATENCIES.keys()
    assert {name: list(values) for name, values in found.items()} == {
        "ttft": pytest.approx([500]),
        "answer_ttft": pytest.approx([1000]),
        "tpot": pytest.approx([500]),
        "itl": pytest.approx([500]),
        "e2e": pytest.approx([2000]),
        "queue": [7.0],
    }
    assert latencies_ms(outcome(is_stream=False))["ttft"] == []


def test_a_distribution_is_numpys() -> None:
    samples = [float(x) for x in np.random.default_rng(1).exponential(50, 137)]
    found = distribution(samples)
    assert found is not None
    assert (found.n, found.at("min"), found.at("max")) == (137, min(samples), max(samples))
    assert found.at("mean") == pytest.approx(np.mean(samples))
    for percent in (50, 90, 95, 99):
        assert found.at(f"p{percent}") == pytest.approx(np.percentile(samples, percent))
    assert found.stdev == pytest.approx(np.std(samples, ddof=1))
    assert distribution([]) is None


def test_every_statistic_of_one_sample_is_that_sample() -> None:
    found = distribution([7.0])
    assert found is not None
    assert {found.at(name) for name in STATISTICS} == {7.0}
    assert found.stdev == 0.0
    with pytest.raises(KeyError):
        found.at("p75")
