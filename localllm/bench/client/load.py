"""Drives an OpenAI-compatible endpoint: clients that send one call after another, or calls at planned times.

Calls should be ready when they are drawn: work between two calls delays what other clients measure.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.client import Client


async def closed_loop(
    target: Target,
    clients: Sequence[Iterable[Call]],
    keep: Callable[[Outcome], None],
    *,
    duration_s: float | None = None,
    pause_s: float = 0.05,
    stop: asyncio.Event | None = None,
) -> None:
    """Let each client send its calls one after another on its own connection; `keep` hears of every outcome.

    Connections are opened before the first call is sent. After `duration_s` no call is begun any
    more, those begun are waited for. `pause_s` is waited after a call that was not answered, so that
    a server that refuses at once is not flooded.
    `stop`, once set: no call is begun any more, those begun are cancelled and kept as such.
    """
    stop = asyncio.Event() if stop is None else stop
    running = [Client(target, number) for number in range(len(clients))]

    async def one(client: Client, calls: Iterator[Call]) -> None:
        while not stop.is_set() and (ends_s is None or time.perf_counter() < ends_s):
            call = next(calls, None)  # a call that is drawn is sent: who draws may count them
            if call is None:
                return
            outcome = await client.send(call)
            keep(outcome)
            if outcome.end not in (End.ANSWER, End.CANCELLED):
                await _pause(stop, pause_s)

    with _no_old_garbage():
        async with _closing(running, stop):
            await asyncio.gather(*(client.connect() for client in running))
            ends_s = None if duration_s is None else time.perf_counter() + duration_s
            async with asyncio.TaskGroup() as group:
                for client, calls in zip(running, clients, strict=True):
                    group.create_task(one(client, iter(calls)))


async def open_loop(
    target: Target,
    arrivals: Iterable[tuple[float, Call]],
    keep: Callable[[Outcome], None],
    *,
    stop: asyncio.Event | None = None,
) -> None:
    """Send each call at its time, whatever became of those before: `arrivals` are (seconds from now, call).

    Latencies count from `Outcome.due_s`, the planned time, so that no wait is hidden. Connections
    that are free are used again; as many are opened as there are calls under way. Where the system
    gives no more, the call's outcome is End.UNREACHABLE and says so. `stop` as in `closed_loop`.
    """
    stop = asyncio.Event() if stop is None else stop
    idle: list[Client] = []
    clients: list[Client] = []

    async def one(call: Call, due_s: float) -> None:
        if stop.is_set():
            return
        if not idle:
            idle.append(Client(target, len(clients)))
            clients.append(idle[-1])
        client = idle.pop()
        keep(await client.send(call, due_s))
        idle.append(client)

    with _no_old_garbage():
        begun_s = time.perf_counter()
        async with _closing(clients, stop), asyncio.TaskGroup() as group:
            for offset_s, call in arrivals:
                if not await _reached(begun_s + offset_s, stop):
                    return
                group.create_task(one(call, begun_s + offset_s))


async def _reached(moment_s: float, stop: asyncio.Event) -> bool:
    """Wait until `moment_s`; return False where `stop` was set before.

    Timers of the event loop are up to 1 ms late, so the last part of a millisecond is spent awake.
    """
    await _pause(stop, math.floor(1e3 * (moment_s - time.perf_counter()) - 0.2) / 1e3)
    await asyncio.sleep(0)  # however late it is, answers are read in between
    while time.perf_counter() < moment_s and not stop.is_set():
        await asyncio.sleep(0)
    return not stop.is_set()


async def _pause(stop: asyncio.Event, duration_s: float) -> None:
    if duration_s > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await stop.wait()


@asynccontextmanager
async def _closing(clients: Sequence[Client], stop: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the calls of `clients` once `stop` is set; close their connections in the end."""

    async def cancels() -> None:
        await stop.wait()
        for client in clients:
            client.cancel()

    watch = asyncio.create_task(cancels())
    try:
        yield
    finally:
        watch.cancel()
        for client in clients:
            client.close()


@contextmanager
def _no_old_garbage() -> Iterator[None]:
    """Keep the garbage collector from walking all that was there before: its pauses would be measured."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
