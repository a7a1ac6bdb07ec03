from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.load import closed_loop, open_loop
from tests.bench.client.stand_in import Reply, Seen, StandIn
from tests.bench.client.talking import CHAT, endless, story, talk


def test_a_closed_loop_keeps_its_connections_and_one_call_a_client() -> None:
    n_running = most = 0

    async def counted(seen: Seen, reply: Reply) -> None:
        nonlocal n_running, most
        n_running += 1
        most = max(most, n_running)
        await asyncio.sleep(0.002)
        n_running -= 1
        await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> int:
        await closed_loop(server.target(), [[CHAT] * 10] * 4, outcomes.append)
        return server.n_connections

    assert talk(counted, work) == 4
    assert most == 4
    assert sorted(outcome.client for outcome in outcomes) == sorted([0, 1, 2, 3] * 10)
    assert {outcome.end for outcome in outcomes} == {End.ANSWER}


def test_a_closed_loop_ends_after_its_duration_and_sends_every_call_it_drew() -> None:
    outcomes: list[Outcome] = []
    n_drawn = itertools.count()
    calls = (CHAT for _ in n_drawn)

    async def work(server: StandIn) -> None:
        await closed_loop(server.target(), [calls, itertools.repeat(CHAT)], outcomes.append, duration_s=0.2)

    begun_s = time.perf_counter()
    talk(story, work)
    assert 0.2 <= time.perf_counter() - begun_s < 2
    assert sum(outcome.client == 0 for outcome in outcomes) == next(n_drawn) > 2


def test_an_open_loop_hides_no_wait() -> None:
    # One server that serves one call at a time, 50 ms each, called every 10 ms: the tenth waits about 400 ms.
    lock = asyncio.Lock()

    async def one_at_a_time(seen: Seen, reply: Reply) -> None:
        async with lock:
            await asyncio.sleep(0.05)
            await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> None:
        await open_loop(server.target(), [(0.01 * i, CHAT) for i in range(10)], outcomes.append)

    talk(one_at_a_time, work)
    waits_s = sorted(outcome.ended_s - outcome.due_s for outcome in outcomes)
    assert len(waits_s) == 10
    assert waits_s[-1] >= 0.39
    assert waits_s[5] >= 0.22


def test_an_open_loop_sends_at_its_times() -> None:
    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> float:
        begun_s = time.perf_counter()
        await open_loop(server.target(), [(0.0, CHAT), (0.05, CHAT), (0.1, CHAT)], outcomes.append)
        return begun_s

    begun_s = talk(story, work)
    for outcome, offset_s in zip(outcomes, (0.0, 0.05, 0.1), strict=True):
        assert outcome.due_s == pytest.approx(begun_s + offset_s, abs=0.01)
        assert 0 <= outcome.started_s - outcome.due_s < 0.03


async def stop_soon(stop: asyncio.Event, after_s: float = 0.1) -> None:
    await asyncio.sleep(after_s)
    stop.set()


def test_a_stopped_closed_loop_cancels_what_is_under_way_and_keeps_all() -> None:
    outcomes: list[Outcome] = []
    n_drawn = itertools.count()

    async def slow_after_two(seen: Seen, reply: Reply) -> None:
        if seen.fields.get("n", 0) >= 2:
            await endless(seen, reply)
        await story(seen, reply)

    def calls(counter: Any) -> Any:
        for n in itertools.count():
            next(counter)
            yield Call.of("/v1/chat/completions", {"n": n})

    async def work(server: StandIn) -> None:
        stop = asyncio.Event()
        stopping = asyncio.create_task(stop_soon(stop))
        await closed_loop(server.target(), [calls(n_drawn), calls(n_drawn)], outcomes.append, stop=stop)
        await stopping

    begun_s = time.perf_counter()
    talk(slow_after_two, work)
    assert time.perf_counter() - begun_s < 5
    ends = [outcome.end for outcome in outcomes]
    assert ends == [End.ANSWER] * 4 + [End.CANCELLED] * 2
    assert len(outcomes) == next(n_drawn)  # nothing that was drawn is lost
    assert all(outcome.token_s for outcome in outcomes)


def test_a_stopped_open_loop_sends_no_more_and_keeps_what_was_sent() -> None:
    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> int:
        stop = asyncio.Event()
        stopping = asyncio.create_task(stop_soon(stop))
        arrivals = ((0.02 * n, CHAT) for n in itertools.count())
        await open_loop(server.target(), arrivals, outcomes.append, stop=stop)
        await stopping
        return len(server.seen)

    n_seen = talk(endless, work)
    assert {outcome.end for outcome in outcomes} == {End.CANCELLED}
    assert 1 <= n_seen <= len(outcomes) <= 8


def test_an_open_loop_that_is_far_behind_can_still_be_stopped() -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("nobody there")

    async def run() -> int:
        asyncio.get_running_loop().create_connection = refuse  # type: ignore[method-assign]
        n_outcomes = itertools.count()
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stop_soon(stop))
            await open_loop(
                Target("127.0.0.1", 1), ((0.0, CHAT) for _ in range(200_000)), lambda _: next(n_outcomes), stop=stop
            )
        return next(n_outcomes)

    assert 0 < asyncio.run(run()) < 200_000


def test_a_loop_stopped_before_it_began_sends_nothing() -> None:
    async def work(server: StandIn) -> list[Outcome]:
        stop = asyncio.Event()
        stop.set()
        outcomes: list[Outcome] = []
        await closed_loop(server.target(), [[CHAT]], outcomes.append, stop=stop)
        await open_loop(server.target(), [(0.0, CHAT)], outcomes.append, stop=stop)
        return outcomes

    assert talk(story, work) == []


def test_a_stop_does_not_wait_for_a_connection_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)

    async def run(load: Callable[..., Awaitable[None]], calls: Any) -> list[Outcome]:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        outcomes: list[Outcome] = []
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(stop_soon(stop))
            await load(Target("127.0.0.1", 1), calls, outcomes.append, stop=stop)
        return outcomes

    begun_s = time.perf_counter()
    assert asyncio.run(run(closed_loop, [[CHAT]])) == []  # none was sent
    assert [outcome.end for outcome in asyncio.run(run(open_loop, [(0.0, CHAT)]))] == [End.CANCELLED]
    assert time.perf_counter() - begun_s < 5


def test_a_bound_on_connections_is_told_as_the_clients_own() -> None:
    async def slow(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(0.3)
        await story(seen, reply)

    outcomes: list[Outcome] = []

    async def work(server: StandIn) -> None:
        loop = asyncio.get_running_loop()
        connect, n_open = loop.create_connection, itertools.count(1)

        async def at_most_two(*arguments: Any, **settings: Any) -> Any:
            if next(n_open) > 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return await connect(*arguments, **settings)

        loop.create_connection = at_most_two  # type: ignore[method-assign,assignment]
        await open_loop(server.target(), [(0.0, CHAT)] * 4, outcomes.append)

    talk(slow, work)
    assert sorted(outcome.end.value for outcome in outcomes) == ["answer", "answer", "unreachable", "unreachable"]
    assert all("ulimit -n" in outcome.fault for outcome in outcomes if outcome.end is End.UNREACHABLE)
