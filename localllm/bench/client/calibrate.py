"""What the client itself costs: CPU time a token, and its part of latencies, found on a server that costs nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from localllm.bench.client.calls import Call, End, Outcome, Target
from localllm.bench.client.load import closed_loop
from localllm.errors import LocalLLMError, pasteable

N_WARMUP = 10
N_FIRST = 50
N_CLIENTS = 2
N_TOKENS = 300
PACE_S = 0.001
"""Between tokens where CPU time is measured: each then costs a turn of the event loop, as a real server's do."""
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """The client's own part in what it measures.

    `cpu_ms_per_token`: CPU time of the client a token, each in a packet of its own; `ttft_ms`, `itl_ms_p50`:
    medians of time to first token and between tokens on a server that answers at once, so the least
    that can be told. `n_tokens`: so many were received.
    """

    cpu_ms_per_token: float
    ttft_ms: float
    itl_ms_p50: float
    n_tokens: int


def calibrate() -> Overhead:
    """Drive a null server for about a second and return what that cost. Not from a coroutine.

    The server is a process of its own, gone when this returns, raises, or is killed.
    Raises: LocalLLMError where it does not start or does not answer.
    """
    with null_server() as target:
        return asyncio.run(_measured(target))


@contextmanager
def null_server() -> Iterator[Target]:
    """Run a null server in a process of its own. Raises LocalLLMError where it does not start."""
    command = [sys.executable, "-P", "-m", "localllm.bench.client.null_server"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # A group of its own: Ctrl-C is for this process, whose end ends the server.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port.isdigit():
                raise LocalLLMError("The server that calibrates the client did not start.", pasteable(*command))
            yield Target("127.0.0.1", int(port), timeout_s=TIMEOUT_S)
        finally:
            process.kill()


async def _measured(target: Target) -> Overhead:
    await _outcomes(target, [[_call(1)] * N_WARMUP])
    firsts = await _outcomes(target, [[_call(1)] * N_FIRST])
    burst = await _outcomes(target, [[_call(N_TOKENS)] * 2])
    began_s = time.thread_time()
    paced = await _outcomes(target, [[_call(N_TOKENS, PACE_S)]] * N_CLIENTS)
    cpu_s = time.thread_time() - began_s
    n_tokens = sum(len(outcome.token_s) for outcome in paced)
    return Overhead(
        cpu_ms_per_token=1e3 * cpu_s / n_tokens,
        ttft_ms=median(1e3 * (outcome.token_s[0] - outcome.due_s) for outcome in firsts),
        itl_ms_p50=median(1e3 * (b - a) for outcome in burst for a, b in pairwise(sorted(set(outcome.token_s)))),
        n_tokens=n_tokens,
    )


def _call(n_tokens: int, pace_s: float = 0.0) -> Call:
    return Call.of("/v1/chat/completions", {"max_tokens": n_tokens, "pace_s": pace_s, "stream": True})


async def _outcomes(target: Target, clients: Sequence[Sequence[Call]]) -> list[Outcome]:
    """Return what became of these calls. Raises LocalLLMError where one was not answered."""
    outcomes: list[Outcome] = []
    await closed_loop(target, clients, outcomes.append)
    for outcome in outcomes:
        if outcome.end is not End.ANSWER:
            raise LocalLLMError(f"The client could not be calibrated: {outcome.fault or outcome.end.value}.")
    return outcomes
