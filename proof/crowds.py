"""What one user feels of the others, what a server costs while nobody asks, and how it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.bench.client.calls import End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.client.latencies import ttft_ms
from localllm.bench.stats.summaries import median
from proof.figures import Figure
from proof.processes import context_switches
from proof.serving import Serving
from proof.sides import BurstFailed, HttpSide

SETTLE_S = 0.5
NEWCOMER_TOKENS = 8
STREAM_TOKENS = 400
STOPPED_TOKENS = 900

Draw = Callable[[int], Sequence[Sequence[int]]]


def idle_ttft_ms(side: HttpSide, draw: Draw, n: int) -> float:
    """Return the median time to a first token on a server that does nothing else."""
    return median([asyncio.run(_newcomer(side, draw(1)[0])) for _ in range(n)])


def newcomers(side: HttpSide, draw: Draw, n_times: int, idle_ms: float, itl_target_s: float) -> Figure:
    """Return how long a newcomer waits for its first token while eight streams of others decode."""
    waits = [asyncio.run(_beside(side, draw, n_streams=8, headers=None)) for _ in range(n_times)]
    what = "a newcomer among 8 streams: time to first token"
    return Figure(what, 2 * idle_ms + 1e3 * itl_target_s, False, median(waits), "ms", min(waits), max(waits), n_times)


def against_many(side: HttpSide, draw: Draw, n_times: int, idle_ms: float, itl_target_s: float) -> Figure:
    """Return how long another client waits while one client has 32 requests out."""
    headers = (("authorization", "Bearer the-one-with-many"),)
    waits = [asyncio.run(_beside(side, draw, n_streams=32, headers=headers)) for _ in range(n_times)]
    what = "a newcomer beside one client's 32 requests: time to first token"
    return Figure(what, 2 * idle_ms + 1e3 * itl_target_s, False, median(waits), "ms", min(waits), max(waits), n_times)


async def _newcomer(side: HttpSide, prompt: Sequence[int]) -> float:
    client = Client(side.target)
    try:
        call = side.call(prompt, NEWCOMER_TOKENS, headers=(("authorization", "Bearer the-newcomer"),))
        return _ttft_ms(await client.send(call))
    finally:
        client.close()


def _ttft_ms(outcome: Outcome) -> float:
    found = ttft_ms(outcome)
    if outcome.end is not End.ANSWER or found is None:
        raise BurstFailed(f"a newcomer: {outcome.end.value} {outcome.error_message or outcome.fault}")
    return found


async def _beside(side: HttpSide, draw: Draw, *, n_streams: int, headers: tuple[tuple[str, str], ...] | None) -> float:
    """Return a newcomer's wait while others have `n_streams` requests out, which are given up after."""
    n_begun, all_begun = 0, asyncio.Event()
    n_needed = min(n_streams, 8)
    clients = [Client(side.target, number) for number in range(n_streams)]

    async def stream(client: Client, prompt: Sequence[int]) -> Outcome:
        nonlocal n_begun
        was_first = True

        def heard(now_s: float) -> None:
            nonlocal n_begun, was_first
            n_begun += was_first
            was_first = False
            if n_begun >= n_needed:
                all_begun.set()

        call = side.call(prompt, STREAM_TOKENS, **({} if headers is None else {"headers": headers}))
        return await client.send(call, on_event=heard)

    tasks = [asyncio.ensure_future(stream(c, p)) for c, p in zip(clients, draw(n_streams), strict=True)]
    try:
        async with asyncio.timeout(300):
            await all_begun.wait()
        await asyncio.sleep(SETTLE_S)
        return await _newcomer(side, draw(1)[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            client.close()
        await asyncio.sleep(SETTLE_S)  # the server notices that they went


def idle_figures(serving: Serving, seconds: float) -> list[Figure]:
    """Return how often server and worker wake up a second while nobody asks anything."""
    pids = {"the HTTP process": serving.pid, "the worker": serving.workers()[-1]}
    before = {name: context_switches(pid) for name, pid in pids.items()}
    began_s = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - began_s
    return [
        Figure(
            f"{name}, idle: context switches a second over {seconds:.0f} s",
            5.0,
            False,
            (context_switches(pid) - before[name]) / elapsed_s,
        )
        for name, pid in pids.items()
    ]


def stop_figures(
    serving: Serving, side: HttpSide, draw: Draw, drain_timeout_s: float
) -> tuple[list[Figure], dict[str, Any]]:
    """Stop the server under eight long streams; return how it went and what the streams ended with."""
    prompts = [*draw(8)]

    async def work() -> tuple[list[Outcome], Outcome]:
        clients = [Client(side.target, number) for number in range(9)]
        with _closing(clients):
            call = side.call(prompts[0], 4)
            await clients[8].send(call)  # a connection that is open when the server begins to stop
            tasks = [
                asyncio.ensure_future(c.send(side.call(p, STOPPED_TOKENS)))
                for c, p in zip(clients, prompts, strict=False)
            ]
            await asyncio.sleep(3.0)
            stopping = asyncio.get_running_loop().run_in_executor(None, serving.stop)
            await asyncio.sleep(0.3)
            refused = await clients[8].send(call)
            ended = list(await asyncio.gather(*tasks))
            await stopping
            return ended, refused

    began_s = time.monotonic()
    ended, refused = asyncio.run(work())
    took_s = time.monotonic() - began_s - 3.0
    was_refused = refused.status == 503 and bool(refused.retry_after_s)
    n_improper = sum(not outcome.end.is_proper for outcome in ended)
    facts = {
        "ends": [f"{outcome.end.value} {outcome.error_code or ''}".strip() for outcome in ended],
        "new_work": f"{refused.end.value} {refused.status} {refused.error_code or ''}".strip(),
        "retry_after_s": refused.retry_after_s,
        "exit_code": serving.exit_code,
    }
    figures = [
        Figure("stop under 8 streams: until everything is gone", drain_timeout_s + 1.5, False, took_s, "s"),
        Figure("stop under 8 streams: streams without a proper end", 0, False, n_improper),
        Figure("stop: new work refused with 503 and Retry-After", 1, True, int(was_refused)),
    ]
    return figures, facts


@contextmanager
def _closing(clients: Sequence[Client]) -> Iterator[None]:
    try:
        yield
    finally:
        for client in clients:
            client.close()
