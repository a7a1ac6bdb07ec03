"""How workloads with their caches, and loads, are written."""

from __future__ import annotations

import pytest

from localllm.bench.serving.series import Loads
from localllm.bench.serving.spec import Cache, Load
from localllm.bench.serving.spelling import parse_loads, split_cache
from localllm.bench.serving.sweep import Sweep
from localllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "rest", "caches"),
    [
        ("chat", "chat", None),
        ("rag:documents=2", "rag:documents=2", None),
        ("chat:cache=warm", "chat", (Cache.WARM,)),
        ("rag:cache=cold+warm,documents=2", "rag:documents=2", (Cache.COLD, Cache.WARM)),
        ("rag:documents=2,cache=restart", "rag:documents=2", (Cache.RESTART,)),
        ("rag:documents=2,cache=warm,answer=3", "rag:documents=2,answer=3", (Cache.WARM,)),
        ("mixed:chat=.6,rag=.4,cache=cold", "mixed:chat=.6,rag=.4", (Cache.COLD,)),
        ("replay:/a/cache=x.jsonl", "replay:/a/cache=x.jsonl", None),
        ("replay:/a/b.jsonl,cache=warm+warm", "replay:/a/b.jsonl", (Cache.WARM,)),
        ("replay /a/b.jsonl,cache=cold", "replay /a/b.jsonl", (Cache.COLD,)),
    ],
)
def test_the_cache_is_taken_out_of_a_workloads_text(text: str, rest: str, caches: tuple[Cache, ...] | None) -> None:
    assert split_cache(text) == (rest, caches)


@pytest.mark.parametrize("text", ["chat:cache=hot", "chat:cache=", "chat:cache=cold,cache=warm", "chat:cache=cold+"])
def test_unknown_caches_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        split_cache(text)


def loads(concurrency: str | None = None, rate: str | None = None, *, is_trace: bool = False) -> Loads:
    return parse_loads(concurrency, rate, is_trace=is_trace)


def test_one_client_is_the_default_and_a_traces_own_times() -> None:
    assert loads() == Loads((Load(concurrency=1),))
    assert loads(is_trace=True) == Loads((Load(),))
    assert loads("2", is_trace=True) == Loads((Load(concurrency=2),))


def test_lists_and_sweeps() -> None:
    assert loads("1, 4,16,4").fixed == (Load(concurrency=1), Load(concurrency=4), Load(concurrency=16))
    assert loads("sweep") == Loads(sweep=Sweep.CLIENTS)
    assert loads(rate="0.5,2").fixed == (Load(rate_per_s=0.5), Load(rate_per_s=2.0))
    assert loads(rate="1,2:gamma=0.5").fixed == (Load(rate_per_s=1.0, shape=0.5), Load(rate_per_s=2.0, shape=0.5))
    assert loads(rate="sweep:gamma=.5") == Loads(sweep=Sweep.RATES, shape=0.5)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1,,2", "", "1.5", "5000", "²", "sweep,1"])
def test_what_is_no_number_of_clients_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--concurrency"):
        loads(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "inf", "nan", "1,,2", "2:gamma=0", "2:gamma=x", "2:shape=1"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rate"):
        loads(rate=text)


def test_two_kinds_of_load_are_refused() -> None:
    with pytest.raises(UsageError, match="two kinds of load"):
        loads("1", "1")


def test_cold_and_warm_are_the_default_but_for_many_rates() -> None:
    both = (Cache.COLD, Cache.WARM)
    assert loads().caches() == loads("1,2").caches() == loads("sweep").caches() == loads(rate="2").caches() == both
    assert loads(rate="1,2").caches() == loads(rate="sweep").caches() == (Cache.COLD,)


@pytest.mark.parametrize("rate", ["1e9", "1e-6", "2:gamma=1000"])
def test_a_rate_that_no_run_could_keep_is_refused(rate: str) -> None:
    with pytest.raises(UsageError, match="of arrivals is"):
        parse_loads(None, rate, is_trace=False)
