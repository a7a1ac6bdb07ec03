"""Drives an OpenAI-compatible endpoint: clients that send one call after another, or calls at planned times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.client import Client


async def closed_loop(
    target: Target,
    clients: Sequence[Iterable[Call]],
    keep: Callable[[Outcome], None],
    *,
    duration_s: float | None = None,
    pause_s: float = 0.05,
) -> None:
    """Let each client send its calls one after another on its own connection; `keep` hears of every outcome.

    After `duration_s` no call is begun any more, those begun are waited for. `pause_s` is waited
    after a call that was not answered, so that a server that refuses at once is not flooded.
    """
    ends_s = None if duration_s is None else time.perf_counter() + duration_s

    async def one(number: int, calls: Iterable[Call]) -> None:
        client = Client(target, number)
        try:
            drawn = iter(calls)  # a call that is drawn is sent: who draws may count them
            while ends_s is None or time.perf_counter() < ends_s:
                call = next(drawn, None)
                if call is None:
                    return
                outcome = await client.send(call)
                keep(outcome)
                if outcome.end not in (End.ANSWER, End.CANCELLED):
                    await asyncio.sleep(pause_s)
        finally:
            client.close()

    async with asyncio.TaskGroup() as group:
        for number, calls in enumerate(clients):
            group.create_task(one(number, calls))


async def open_loop(target: Target, arrivals: Iterable[tuple[float, Call]], keep: Callable[[Outcome], None]) -> None:
    """Send each call at its time, whatever became of those before: `arrivals` are (seconds from now, call).

    Latencies count from `Outcome.due_s`, the planned time, so that no wait is hidden. Connections
    that are free are used again.
    """
    begun_s = time.perf_counter()
    idle: list[Client] = []
    clients: list[Client] = []

    async def one(call: Call, due_s: float) -> None:
        if not idle:
            idle.append(Client(target, len(clients)))
            clients.append(idle[-1])
        client = idle.pop()
        keep(await client.send(call, due_s))
        idle.append(client)

    try:
        async with asyncio.TaskGroup() as group:
            for offset_s, call in arrivals:
                await asyncio.sleep(begun_s + offset_s - time.perf_counter())
                group.create_task(one(call, begun_s + offset_s))
    finally:
        for client in clients:
            client.close()
