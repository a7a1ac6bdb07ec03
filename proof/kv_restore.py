"""How fast blocks come back, and how much there is room for: from page cache to the device, checksum included."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localllm import compose
from localllm.backends import registry
from localllm.backends.placement import place
from localllm.bench.stats.summaries import estimate
from localllm.models.memory import kv_bytes_per_token
from localllm.runtime.config import LoadConfig, TierConfig
from localllm.runtime.engine import Batch, BatchItem, Clear, EditOutcome, Engine, Restore
from localllm.runtime.kv.blocks import NO_ROOT, Block, Chain, KeyMaker
from localllm.runtime.kv.disk import DiskTier
from proof.kv_parts import Asked, Beside, Part
from proof.kv_sides import Ours
from proof.sides import BurstFailed

N_TOKENS, BLOCK_TOKENS = 1536, 64
WRITE_S = 60.0
SPEED = Asked("blocks put back from page cache, checksum included", 0.7, at_least=True, unit="GB/s")
ROOM = Asked("what default tiers may hold over what the pool holds", 50.0, at_least=True)


@contextmanager
def engine_of(model: Path) -> Iterator[Engine]:
    """Open an engine over a model."""
    found, info = compose.find(model)
    placement = place(info, registry.machine(), LoadConfig(ctx=4096, parallel=1), None)
    weights = registry.load_model(info, placement, found.sha256 or "")
    engine = registry.open_engine(weights, placement)
    try:
        yield engine
    finally:
        engine.close()


def restore_speed(model: Path, folder: Path, tokens: Sequence[int], n_rounds: int) -> Part:
    """Read blocks from files that the page cache holds, verify them, and put them into a slot, one after another."""
    with engine_of(model) as engine:
        for start in range(0, N_TOKENS, engine.spec.max_batch_tokens):
            rows = tuple(tokens[start : min(N_TOKENS, start + engine.spec.max_batch_tokens)])
            engine.forward(Batch((BatchItem(0, start, rows, 0),)))
        config = TierConfig(ram_bytes=0, disk_dir=str(folder), disk_bytes=4 << 30)
        blocks, n_bytes = _written(engine, config, tokens)
        disk = DiskTier(config, fingerprint=engine.spec.fingerprint, model_name="proof")
        try:
            speeds = [n_bytes / 1e9 / _restored_s(engine, disk, blocks) for _ in range(-1, n_rounds)][1:]
        finally:
            disk.close(flush_s=0.0)
    return Part([SPEED.of(estimate(speeds))], (), {"blocks": len(blocks), "bytes": n_bytes})


def _written(engine: Engine, config: TierConfig, tokens: Sequence[int]) -> tuple[list[Block], int]:
    """Have the slot's blocks written; return them and their bytes. Raises BurstFailed where they do not arrive."""
    disk = DiskTier(config, fingerprint=engine.spec.fingerprint, model_name="proof")
    chain = Chain(KeyMaker(engine.spec.fingerprint, disk.secret, BLOCK_TOKENS), NO_ROOT)
    blocks, n_bytes = [], 0
    for start in range(0, N_TOKENS, BLOCK_TOKENS):
        block = chain.block(tokens, start, start + BLOCK_TOKENS)
        blob = engine.export(0, start, start + BLOCK_TOKENS)
        if not disk.write(block, blob, prefix_tokens=N_TOKENS, is_second_use=True, wait_s=WRITE_S):
            raise BurstFailed("a block was not taken for writing")
        blocks.append(block)
        n_bytes += len(blob)
    disk.close(flush_s=WRITE_S)
    return blocks, n_bytes


def _restored_s(engine: Engine, disk: DiskTier, blocks: Sequence[Block]) -> float:
    """Return the seconds that it takes to have all blocks back in a slot that is empty. Raises BurstFailed."""
    engine.edit((Clear(0),))
    began_s = time.perf_counter()
    for block in blocks:
        blob = disk.read(block)
        (put,) = engine.edit((Restore(0, block.start, blob or b""),))
        if put.outcome is not EditOutcome.OK or put.n_valid != block.end:
            raise BurstFailed(f"a block at {block.start} did not come back")
    return time.perf_counter() - began_s


def default_room(model: Path, folder: Path) -> Part:
    """Start a server without any flag, and compare what its tiers may hold with what its pool holds."""
    plain = Ours("defaults", folder / "defaults", [str(model)])
    try:
        plain.start()
        samples, pool_tokens = plain.samples(), plain.pool_tokens
    finally:
        plain.stop()
    _, info = compose.find(model)
    pool_bytes = pool_tokens * kv_bytes_per_token(info)
    ram, disk = samples["localllm_kv_ram_limit_bytes"], samples["localllm_kv_disk_folder_limit_bytes"]
    times, free = (ram + disk) / pool_bytes, shutil.disk_usage(folder).free
    facts = {"room": {"ram_bytes": ram, "disk_bytes": disk, "pool_bytes": pool_bytes, "free_disk_bytes": free}}
    if times < ROOM.asked and ram + free / 10 < ROOM.asked * pool_bytes:
        short = f"{ROOM.what}; for {ROOM.asked:g} times it, a tenth of the free disk is too little here"
        return Part((), [Beside(short, "", {plain.name: [times]})], facts)
    return Part([ROOM.at(times)], (), facts)
