"""What keeping KV costs those who do not gain by it: requests that never hit, and streams beside what is kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from localllm.bench.client.calls import Call, Outcome
from localllm.bench.client.client import Client
from localllm.bench.client.latencies import e2e_ms, ttft_ms
from localllm.bench.stats.summaries import mean, paired_ratio, percentile
from proof.figures import Figure, figure
from proof.kv_measures import SETTLE_S, Beside, Part, ask, first_ms
from proof.kv_sides import Ours, TokenPrompts
from proof.processes import usage
from proof.sides import burst_of

NEVER_TOKENS, NEVER_GEN, IN_A_ROW = 150, 16, 3
FILL_TOKENS = 1000
OWN, LONG_TOKENS, STREAM_GEN, AT_TOKEN = 20, 4000, 160, 40
WRITTEN_TOKENS, WRITE_GEN, AFTER_S = 1100, 220, 1.0
POOL_CTX, POOL_PROMPT, POOL_GEN = 2048, 100, 400


def never_hits(kept: Ours, off: Ours, draw: TokenPrompts, n_pairs: int, when: str) -> Part:
    """Requests that share nothing, three in a row, on a server that keeps everything and on one that keeps nothing.

    In a row, so that what is exported after one falls on the next.
    """

    def row(server: Ours) -> float:
        taken = [
            e2e_ms(ask(server.side, [draw.fresh(NEVER_TOKENS)], NEVER_GEN)[0])
            for _ in range(IN_A_ROW)
        ]  # fmt: skip
        time.sleep(SETTLE_S)
        return sum(taken)

    with_tiers, without = [], []
    for at in range(-1, n_pairs):
        found = {server.name: row(server) for server in ((kept, off) if at % 2 else (off, kept))}
        if at >= 0:
            with_tiers.append(found[kept.name])
            without.append(found[off.name])
    what = f"requests that never hit, {when}: time over that without tiers and retention"
    ratio = paired_ratio(with_tiers, without)
    return Part([figure(what, 1.02, ratio, at_least=False)], (), {f"never_{when}": [with_tiers, without]})


def fill(kept: Ours, draw: TokenPrompts, n_prompts: int, ram_bytes: int) -> Part:
    """Distinct prompts one after another; then the memory that is held, and a prompt among the last once more."""
    (worker,) = kept.serving.workers()
    before = usage(worker).rss_bytes
    prompts = [draw.fresh(FILL_TOKENS) for _ in range(n_prompts)]
    cold = [first_ms(kept.side, prompt, 1) for prompt in prompts]
    time.sleep(3 * SETTLE_S)
    grown = usage(worker).rss_bytes - before
    again, ram = [], []
    for at in range(max(0, n_prompts - 6), n_prompts - 3):
        tokens = kept.sources().get("ram", 0)
        again.append(first_ms(kept.side, prompts[at], 1) / cold[at])
        ram.append(kept.sources().get("ram", 0) - tokens)
        time.sleep(SETTLE_S)
    what = f"after {n_prompts} distinct prompts of {FILL_TOKENS} tokens"
    return Part(
        [
            Figure(f"{what}: resident memory grown by, over --kv-ram", 1.0, False, grown / ram_bytes),
            *_disk_figure(kept.folder, what),
        ],
        [Beside(f"{what}: one of the last again, first token over cold", "", {kept.name: again})] if again else [],
        {"grown_bytes": grown, "again_from_ram_tokens": ram},
    )


def _disk_figure(folder: Path, what: str) -> list[Figure]:
    n_bytes = disk_bytes(folder)
    return [Figure(f"{what}: bytes on disk, GB", 4.0, False, n_bytes / 1e9)]


def disk_bytes(folder: Path) -> int:
    """Return what the blocks under a server's folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*.kv"))


async def _beside(side_calls: Callable[[], Call], server: Ours, other: Call) -> tuple[Outcome, Outcome]:
    """Send a stream, and another call once it has AT_TOKEN pieces; return both outcomes."""
    first, second = Client(server.side.target, 0), Client(server.side.target, 1)
    reached, n_events = asyncio.Event(), 0

    def heard(now_s: float) -> None:
        nonlocal n_events
        n_events += 1
        if n_events == AT_TOKEN:
            reached.set()

    try:
        await second.connect()
        stream = asyncio.ensure_future(first.send(side_calls(), on_event=heard))
        waits = asyncio.ensure_future(reached.wait())
        await asyncio.wait((stream, waits), return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        beside = await second.send(other)
        return await stream, beside
    finally:
        first.close()
        second.close()


def gaps_ms(outcome: Outcome, begin_s: float, end_s: float) -> list[float]:
    """Return the times between pieces of a stream that overlap an interval of time."""
    moments = sorted(set(outcome.token_s))
    return [1e3 * (b - a) for a, b in pairwise(moments) if b > begin_s and a < end_s]


def restored_beside(kept: Ours, draw: TokenPrompts, n_times: int) -> Part:
    """A stream while a long prompt that is known is put back for another client, against the same stream before."""
    long = draw.fresh(LONG_TOKENS)
    first_ms(kept.side, long, 1)
    time.sleep(SETTLE_S)
    pairs: list[tuple[list[float], list[float]]] = []
    restored, windows = [], []
    for _ in range(n_times):
        side, before = kept.side, kept.sources()
        stream, other = asyncio.run(
            _beside(lambda: side.call(draw.fresh(OWN), STREAM_GEN), kept, side.call(long, 1))  # noqa: B023
        )
        burst_of(side.name, [stream], STREAM_GEN, None)
        burst_of(side.name, [other], 1, None)
        after = kept.sources()
        restored.append(sum(after.get(s, 0) - before.get(s, 0) for s in ("ram", "disk")))
        windows.append(ttft_ms(other) or 0.0)
        alone = gaps_ms(stream, stream.token_s[4], other.started_s)
        pairs.append((gaps_ms(stream, other.started_s, other.token_s[0]), alone))
        time.sleep(SETTLE_S)
    used = [pair for pair, n in zip(pairs, restored, strict=True) if n >= LONG_TOKENS - 64]
    facts = {"restored_beside": {"tokens": restored, "first_token_ms": windows, "gaps_ms": pairs}}
    if not used:
        return Part((), (), facts)
    ratio, low, high = pooled_p95_ratio(used)
    what = f"a stream while {LONG_TOKENS} tokens are put back for another: p95 between tokens over before"
    return Part([Figure(what, 1.25, False, ratio, "", low, high, len(used))], (), facts)


def pooled_p95_ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float, float]:
    """Return the ratio of the 95th percentiles over all pairs, and its bootstrap interval over pairs."""
    rng = random.Random(0)

    def ratio(some: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        during = [gap for pair in some for gap in pair[0]]
        alone = [gap for pair in some for gap in pair[1]]
        return percentile(during, 95) / percentile(alone, 95)

    drawn = [ratio(rng.choices(pairs, k=len(pairs))) for _ in range(1000)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return ratio(pairs), float(low), float(high)


def written_beside(kept: Ours, off: Ours, draw: TokenPrompts, n_pairs: int) -> Part:
    """A stream after another client's prompt has ended, which one server exports and writes and the other forgets."""

    def one(server: Ours) -> float:
        side = server.side
        stream, other = asyncio.run(
            _beside(lambda: side.call(draw.fresh(OWN), WRITE_GEN), server, side.call(draw.fresh(WRITTEN_TOKENS), 1))
        )
        burst_of(side.name, [other], 1, None)
        time.sleep(SETTLE_S)
        return mean(gaps_ms(stream, other.ended_s, other.ended_s + AFTER_S))

    with_tiers, without = [], []
    n_before = disk_bytes(kept.folder)
    for at in range(n_pairs):
        found = {server.name: one(server) for server in ((kept, off) if at % 2 else (off, kept))}
        with_tiers.append(found[kept.name])
        without.append(found[off.name])
    time.sleep(1.0)
    written = disk_bytes(kept.folder) - n_before
    what = f"a stream while {WRITTEN_TOKENS} tokens are exported and written: time between tokens over without tiers"
    facts = {"written_beside": {"ms": [with_tiers, without], "written_bytes": written}}
    return Part([figure(what, 1.05, paired_ratio(with_tiers, without), at_least=False)], (), facts)


def pool_use(server: Ours, draw: TokenPrompts) -> Part:
    """Eight answers that do not fit into the pool together."""
    ask(server.side, [draw.fresh(POOL_PROMPT) for _ in range(8)], POOL_GEN)
    samples = server.samples()
    use = samples.get("localllm_kv_cache_usage_at_first_refusal_ratio", 0.0)
    return Part(
        [Figure("pool use when room was first short", 0.96, True, use)],
        (),
        {"preemptions": samples.get("localllm_preemptions_total")},
    )
