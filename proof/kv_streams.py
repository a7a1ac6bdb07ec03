"""What keeping KV costs those who do not gain by it: requests that never hit, and streams beside what is kept."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from localllm.bench.client.calls import Call, Outcome
from localllm.bench.client.client import Client
from localllm.bench.client.latencies import e2e_ms, ttft_ms
from localllm.bench.stats.summaries import mean, paired_ratio, percentile
from proof.kv_measures import SETTLE_S, ask, first_ms
from proof.kv_parts import Asked, Beside, Part
from proof.kv_sides import Ours, TokenPrompts
from proof.processes import usage
from proof.sides import burst_of

NEVER_TOKENS, NEVER_GEN, IN_A_ROW = 150, 16, 3
FILL_TOKENS = 1000
WAITING_BYTES = 256 * 10**6
"""What a model may hold beside `--kv-ram`, waiting to be written, as docs/cache.md says."""
OWN, LONG_TOKENS, STREAM_GEN, AT_TOKEN = 20, 4000, 160, 40
WRITTEN_TOKENS, WRITE_GEN, AFTER_S = 1100, 220, 1.0
BLOCK_TOKENS = 64
POOL_CTX, POOL_PROMPT, POOL_GEN = 2048, 100, 400

_RESTORED = f"a stream while {LONG_TOKENS} tokens are put back for another"
_WRITTEN = f"a stream while {WRITTEN_TOKENS} tokens are exported and written"
RESTORED_P95 = Asked(f"{_RESTORED}: p95 between tokens over before", 1.25)
WRITTEN_MEAN = Asked(f"{_WRITTEN}: time between tokens over without tiers", 1.05)
WRITTEN_P95 = Asked(f"{_WRITTEN}: p95 between tokens over without tiers", 1.05)
POOL_USE = Asked("pool use when room was first short", 0.96, at_least=True)


def never_asked(when: str) -> Asked:
    """Return what is asked of requests that never hit."""
    return Asked(f"requests that never hit, {when}: time over that without tiers and retention", 1.02)


def fill_asked(n_prompts: int, disk: str) -> tuple[Asked, Asked]:
    """Return what is asked of the memory, and of the disk, of a server that was filled."""
    what = f"after {n_prompts} distinct prompts of {FILL_TOKENS} tokens"
    most = "resident memory grown by at most, over --kv-ram and the 256 MB that wait to be written"
    return Asked(f"{what}: {most}", 1.0), Asked(f"{what}, and a stop: bytes on disk over --kv-disk {disk}", 1.0)


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
    ratio = paired_ratio(with_tiers, without)
    return Part([never_asked(when).of(ratio)], (), {f"never_{when}": [with_tiers, without]})


def fill(server: Ours, draw: TokenPrompts, n_prompts: int, ram_bytes: int, asked: Asked) -> Part:
    """Distinct prompts one after another on a new server; the memory that it takes, and some of the last once more.

    It proves nothing unless the RAM tier was filled.
    """
    (worker,) = server.serving.workers()
    first_ms(server.side, draw.fresh(OWN))  # so that the model's pages are in memory
    time.sleep(SETTLE_S)
    before = usage(worker).rss_bytes
    prompts = [draw.fresh(FILL_TOKENS) for _ in range(n_prompts)]
    cold, held = [], []
    for prompt in prompts:
        cold.append(first_ms(server.side, prompt, 1))
        held.append(usage(worker).rss_bytes)
    time.sleep(3 * SETTLE_S)
    held.append(usage(worker).rss_bytes)
    again, from_ram = [], []
    for at in range(max(0, n_prompts - 6), n_prompts - 3):
        tokens = server.sources().get("ram", 0)
        again.append(first_ms(server.side, prompts[at], 1) / cold[at])
        from_ram.append(server.sources().get("ram", 0) - tokens)
        time.sleep(SETTLE_S)
    kept_bytes = server.samples().get("localllm_kv_ram_bytes", 0.0)
    beside = f"after {n_prompts} distinct prompts of {FILL_TOKENS} tokens: one of the last again, first token over cold"
    return Part(
        [asked.at((max(held) - before) / (ram_bytes + WAITING_BYTES))],
        [Beside(beside, "", {server.name: again})] if again else [],
        {"rss_bytes": [before, *held], "kept_in_ram_bytes": kept_bytes, "again_from_ram_tokens": from_ram},
        "" if kept_bytes >= 0.9 * ram_bytes else f"the RAM tier holds only {kept_bytes / 1e9:.2f} GB",
    )


def left_on_disk(server: Ours, disk_bytes: int, asked: Asked) -> Part:
    """Stop a server that holds more in RAM than it may leave on disk, and look at what it left."""
    server.stop()
    n_bytes = sum(path.stat().st_size for path in server.folder.rglob("*.kv"))
    lacks = "" if n_bytes >= 0.5 * disk_bytes else f"only {n_bytes / 1e9:.2f} GB were written at the stop"
    return Part([asked.at(n_bytes / disk_bytes)], (), {"left_on_disk_bytes": n_bytes}, lacks)


async def beside(
    stream_call: Callable[[], Call], server: Ours, other: Call, at_token: int = AT_TOKEN
) -> tuple[Outcome, Outcome]:
    """Send a stream, and another call once it has `at_token` pieces; return both outcomes."""
    first, second = Client(server.side.target, 0), Client(server.side.target, 1)
    reached, n_events = asyncio.Event(), 0

    def heard(now_s: float) -> None:
        nonlocal n_events
        n_events += 1
        if n_events == at_token:
            reached.set()

    try:
        await second.connect()
        stream = asyncio.ensure_future(first.send(stream_call(), on_event=heard))
        waits = asyncio.ensure_future(reached.wait())
        await asyncio.wait((stream, waits), return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        outcome = await second.send(other)
        return await stream, outcome
    finally:
        first.close()
        second.close()


def gaps_ms(outcome: Outcome, begin_s: float, end_s: float) -> list[float]:
    """Return the times between pieces of a stream that overlap an interval of time."""
    moments = sorted(set(outcome.token_s))
    return [1e3 * (b - a) for a, b in pairwise(moments) if b > begin_s and a < end_s]


def restored_beside(kept: Ours, draw: TokenPrompts, n_times: int) -> Part:
    """A stream while a long prompt that is known is put back for another client, against the same stream before.

    It proves nothing where less than half of the rounds put it all back.
    """
    long = draw.fresh(LONG_TOKENS)
    first_ms(kept.side, long, 1)
    time.sleep(SETTLE_S)
    pairs: list[tuple[list[float], list[float]]] = []
    restored, windows = [], []
    for _ in range(n_times):
        side, before = kept.side, kept.sources()
        stream, other = asyncio.run(
            beside(lambda: side.call(draw.fresh(OWN), STREAM_GEN), kept, side.call(long, 1))  # noqa: B023
        )
        burst_of(side.name, [stream], STREAM_GEN, None)
        burst_of(side.name, [other], 1, None)
        after = kept.sources()
        restored.append(sum(after.get(s, 0) - before.get(s, 0) for s in ("ram", "disk")))
        windows.append(ttft_ms(other) or 0.0)
        alone = gaps_ms(stream, stream.token_s[4], other.started_s)
        pairs.append((gaps_ms(stream, other.started_s, other.token_s[0]), alone))
        time.sleep(SETTLE_S)
    used = [pair for pair, n in zip(pairs, restored, strict=True) if n >= LONG_TOKENS - BLOCK_TOKENS]
    facts = {"restored_beside": {"tokens": restored, "first_token_ms": windows, "gaps_ms": pairs}}
    if 2 * len(used) < n_times:
        return Part((), (), facts, f"all was put back in {len(used)} of {n_times} rounds only")
    return Part([RESTORED_P95.at(*pooled_p95_ratio(used), len(used))], (), facts)


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
    """A stream after another client's prompt has ended, which one server exports and writes and the other forgets.

    It proves nothing where less than half of the rounds wrote that prompt before their stream had ended.
    """

    def one(server: Ours) -> list[float]:
        side = server.side
        stream, other = asyncio.run(
            beside(lambda: side.call(draw.fresh(OWN), WRITE_GEN), server, side.call(draw.fresh(WRITTEN_TOKENS), 1))
        )
        burst_of(side.name, [stream], WRITE_GEN, None)
        burst_of(side.name, [other], 1, None)
        return gaps_ms(stream, other.ended_s, other.ended_s + AFTER_S)

    pairs: list[tuple[list[float], list[float]]] = []
    written = []
    for at in range(n_pairs):
        gaps: dict[str, list[float]] = {}
        for server in (kept, off) if at % 2 else (off, kept):
            n_before = written_blocks(kept)
            gaps[server.name] = one(server)
            if server is kept:
                written.append(written_blocks(kept) - n_before)
            time.sleep(SETTLE_S)
        pairs.append((gaps[kept.name], gaps[off.name]))
    used = [
        pair for pair, n in zip(pairs, written, strict=True) if n >= WRITTEN_TOKENS // BLOCK_TOKENS and all(pair)
    ]  # fmt: skip
    facts = {"written_beside": {"gaps_ms": pairs, "written_blocks": written}}
    if not used or 2 * len(used) < n_pairs:
        return Part((), (), facts, f"the prompt was written beside the stream in {len(used)} of {n_pairs} rounds only")
    ratio = paired_ratio([mean(during) for during, _ in used], [mean(without) for _, without in used])
    return Part([WRITTEN_MEAN.of(ratio), WRITTEN_P95.at(*pooled_p95_ratio(used), len(used))], (), facts)


def written_blocks(server: Ours) -> int:
    """Return the blocks that a server has written to disk so far."""
    return int(server.samples().get("localllm_kv_disk_written_blocks_total", 0))


def pool_use(server: Ours, draw: TokenPrompts) -> Part:
    """Eight answers that do not fit into the pool together."""
    ask(server.side, [draw.fresh(POOL_PROMPT) for _ in range(8)], POOL_GEN)
    samples = server.samples()
    use = samples.get("localllm_kv_cache_usage_at_first_refusal_ratio")
    lacks = "room was never short" if use is None else ""
    return Part([POOL_USE.at(use or 0.0)], (), {"preemptions": samples.get("localllm_preemptions_total")}, lacks)
