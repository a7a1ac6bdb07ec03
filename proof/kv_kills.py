"""Ends writers of the disk tier by SIGKILL while they write, and looks at what is left: `python -m proof.kv_kills`.

Two processes write into one folder, with too little room for all, and read again what lies there. One is ended
at a random moment, then the other. Then all is cleared: until then, what was pinned at first and the day's count must
have outlived them. Then a writer is ended before its first, second, ... call of the system.
A block's bytes follow from its key, so that every one can be checked by anybody.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from localllm.runtime.config import TierConfig
from localllm.runtime.kv import disk_writer
from localllm.runtime.kv.blocks import KEY_BYTES, MARK_BYTES, Block
from localllm.runtime.kv.disk import DiskTier
from localllm.runtime.kv.disk_format import PARTIAL_SUFFIX, SUFFIX, BadFile, is_partial_left_behind, read_file
from localllm.runtime.kv.disk_room import spent_today
from proof.output import MEASURED, header, tell, write_json
from proof.processes import leave_nothing_when_terminated

BUDGET_BYTES = 48 << 20
MOST_WAITING_BYTES = 4 << 20
N_CHAINS, CHAIN_BLOCKS = 400, 6
PINNED_CHAIN = 10**7  # that no writer writes
MOST_DELAY_S, MOST_SEARCH_S = 0.25, 2.0
MIN_AMID = 0.1  # of the kills, that must have left a file half written
ROOT_KEY = bytes(KEY_BYTES)
CALLS = ("open", "write", "fsync", "utime", "replace", "unlink", "mkdir", "link")
WRONG_BYTES, NOT_WRITTEN = 3, 4
"""How a writer ends that found a wrong block, or whose writing failed."""
BAD = (
    "wrong_blocks",
    "half_files",
    "set_aside",
    "partial_after_sweep",
    "writes_lost_after",
    "writers_that_failed",
    "pins_lost",
    "days_lost",
    "left_after_clear",
)
"""What must be counted nowhere."""


def block_at(chain: int, at: int) -> Block:
    """Return one block of a chain: the same in every process."""
    parent = block_key(chain, at - 1) if at else ROOT_KEY
    key = block_key(chain, at)
    return Block(key, parent, at * 64, 64, hashlib.shake_128(b"marks" + key).digest(64 * MARK_BYTES))


def block_key(chain: int, at: int) -> bytes:
    """Return the key of one block of a chain."""
    return hashlib.blake2b(f"{chain} {at}".encode(), digest_size=KEY_BYTES).digest()


def bytes_of(key: bytes) -> bytes:
    """Return the only right bytes of a block, of 4 kB to 1 MB."""
    return hashlib.shake_128(key).digest(4096 << (key[-1] % 9))


def open_tier(folder: Path, budget_bytes: int = BUDGET_BYTES) -> DiskTier:
    """Open the folder that all write into."""
    config = TierConfig(disk_dir=str(folder), disk_bytes=budget_bytes, disk_daily_bytes=1 << 50)
    return DiskTier(config, fingerprint="the engine of the proof", model_name="proof")


# --- a writer


def write_for_ever(folder: Path, seed: int, kill_at: int | None) -> int:
    """Write blocks and read them again until somebody ends this process; return why, where it ends itself.

    Without the pauses that leave the cores to others: the process is to be ended amid a file.
    """
    disk_writer._MOST_PAUSE_S = 0.0
    rng = random.Random(seed)
    if kill_at is not None:
        end_before_call(kill_at)
    disk = open_tier(folder)
    print("writing", flush=True)
    while True:
        chain = rng.randrange(N_CHAINS)
        for at in range(CHAIN_BLOCKS):
            block = block_at(chain, at)
            disk.write(block, bytes_of(block.key), prefix_tokens=4096, is_second_use=True, wait_s=5.0)
        while disk.stats().waiting_bytes > MOST_WAITING_BYTES:
            time.sleep(0.001)
        disk.used([block_key(chain, at) for at in range(CHAIN_BLOCKS)])
        chain, at = rng.randrange(N_CHAINS), rng.randrange(CHAIN_BLOCKS)
        found = disk.find(block_at(chain, at).parent, block_key(chain, at))
        blob = None if found is None else disk.read(found)
        if blob not in (None, bytes_of(block_key(chain, at))) or disk.stats().n_bad:
            return WRONG_BYTES
        if disk.stats().n_failed:
            return NOT_WRITTEN


def end_before_call(number: int) -> None:
    """End this process before its call of that number that may change what lies on disk."""
    counter = iter(range(number + 1))

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(counter, number) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def start(stack: ExitStack, folder: Path, seed: int, kill_at: int | None = None) -> subprocess.Popen[str]:
    """Start a writer; it writes when this returns."""
    command = [sys.executable, "-m", "proof.kv_kills", "--writer", str(folder), str(seed)]
    command += [] if kill_at is None else [str(kill_at)]
    root = Path(__file__).resolve().parent.parent
    process = stack.enter_context(subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    return process


# --- what is left


def look(folder: Path, found: Counter[str]) -> None:
    """Check every block of the folder, as another process finds it, and as it lies there."""
    disk = open_tier(folder)
    try:
        for block in chains(disk, ROOT_KEY):
            blob = disk.read(block)
            found["blocks_read"] += blob is not None
            found["bytes_read"] += len(blob or b"")
            found["wrong_blocks"] += blob not in (None, bytes_of(block.key))
        found["set_aside"] += disk.stats().n_bad
        for path in folder.rglob("*" + SUFFIX):
            with suppress(FileNotFoundError):  # who still writes may delete it
                found["files_checked"] += 1
                found["half_files"] += not is_right(path)
    finally:
        disk.close(flush_s=0)


def chains(disk: DiskTier, parent: bytes) -> Iterator[Block]:
    """Yield all blocks that follow a parent, and those that follow them."""
    for block in disk.children(parent):
        yield block
        yield from chains(disk, block.key)


def is_right(path: Path) -> bool:
    """Say whether a file is believed and holds what was written under its name. Raises FileNotFoundError."""
    try:
        known, blob = read_file(path)
    except BadFile:
        return False
    return path.name.startswith(known.block.key.hex()) and blob == bytes_of(known.block.key)


def n_partial(folder: Path) -> int:
    """Return how many files lie there that were being written."""
    return sum(1 for _ in folder.rglob("*" + PARTIAL_SUFFIX))


def left_behind(folder: Path) -> set[Path]:
    """Return the files that were being written by somebody who is no more."""
    found = set()
    for path in folder.rglob("*" + PARTIAL_SUFFIX):
        with suppress(FileNotFoundError):
            if is_partial_left_behind(path):
                found.add(path)
    return found


def sweep(folder: Path, found: Counter[str]) -> None:
    """Let a new process write one block, as any would after a crash."""
    disk = open_tier(folder)
    block = block_at(10**6 + found["sweeps"], 0)
    disk.write(block, bytes_of(block.key), prefix_tokens=4096, is_second_use=True)
    disk.close(flush_s=10.0)
    found["sweeps"] += 1
    found["partial_after_sweep"] += n_partial(folder)
    found["writes_lost_after"] += disk.stats().n_written != 1


def pin(folder: Path) -> None:
    """Write one chain that must stay until all is cleared."""
    disk = open_tier(folder)
    for at in range(CHAIN_BLOCKS):
        block = block_at(PINNED_CHAIN, at)
        disk.write(block, bytes_of(block.key), prefix_tokens=4096, is_second_use=True, is_pinned=True, wait_s=5.0)
    disk.close(flush_s=10.0)


def clear(folder: Path, found: Counter[str]) -> None:
    """Count what is pinned and still there, and whether the day's count is; then clear, and count what is left."""
    disk = open_tier(folder)
    try:
        for at in range(CHAIN_BLOCKS):
            block = block_at(PINNED_CHAIN, at)
            held = disk.find(block.parent, block.key)
            found["pins_lost"] += held is None or disk.read(held) != bytes_of(block.key)
        found["days_lost"] += spent_today(folder) == 0
        disk.clear()
        found["left_after_clear"] += disk.find(block.parent, block.key) is not None
        found["left_after_clear"] += sum(1 for _ in folder.rglob("*" + SUFFIX))
    finally:
        disk.close(flush_s=0)


# --- the run


def end_at_random(folder: Path, n_kills: int, rng: random.Random) -> Counter[str]:
    """End writers at random moments, two at a time, the second while it alone goes on, and amid a file."""
    found: Counter[str] = Counter()
    pin(folder)
    while found["kills"] < n_kills:
        with ExitStack() as stack:
            writers = [start(stack, folder, rng.randrange(2**31)) for _ in range(2)]
            for writer in writers:
                assert writer.stdout is not None
                writer.stdout.readline()
            for is_alone, writer in enumerate(rng.sample(writers, 2)):
                time.sleep(rng.uniform(0.0, MOST_DELAY_S))
                if is_alone:
                    stop_amid_a_file(writer, folder, rng)
                found["writers_that_failed"] += writer.poll() is not None
                before = left_behind(folder)
                writer.kill()
                writer.wait()
                found["kills"] += 1
                left = left_behind(folder) - before
                found["amid_a_file"] += bool(left)
                found["partial_left"] += len(left)
                look(folder, found)
        sweep(folder, found)
        if found["kills"] % 20 == 0:
            tell(f"{found['kills']} of {n_kills} kills: {dict(found)}")
    found["bytes_left"] = sum(path.stat().st_size for path in folder.rglob("*" + SUFFIX))
    return found


def stop_amid_a_file(writer: subprocess.Popen[str], folder: Path, rng: random.Random) -> None:
    """Hold a writer up at a random moment at which it writes a file: those are few, it hashes more than it writes."""
    end_s = time.monotonic() + MOST_SEARCH_S
    while time.monotonic() < end_s:
        writer.send_signal(signal.SIGSTOP)
        if n_partial(folder):
            return
        writer.send_signal(signal.SIGCONT)
        time.sleep(rng.uniform(0.0, 0.01))


def end_at_each_call(folder: Path, n_calls: int) -> Counter[str]:
    """End a writer before each of its first calls of the system; in a new folder, and in that which is left."""
    found: Counter[str] = Counter()
    for number in range(n_calls):
        with ExitStack() as stack:
            writer = start(stack, folder / f"{number % 4}", number, number)
            with suppress(subprocess.TimeoutExpired):
                writer.wait(20.0)
            found["kills"] += writer.poll() == -signal.SIGKILL
        found["partial_left"] += n_partial(folder / f"{number % 4}")
        look(folder / f"{number % 4}", found)
        sweep(folder / f"{number % 4}", found)
    tell(f"at each call: {dict(found)}")
    return found


def n_damaged_believed(folder: Path, n: int, rng: random.Random) -> int:
    """Return how many of `n` files that were damaged on purpose are believed: the check must be able to fail."""
    paths = sorted(folder.rglob("*" + SUFFIX))
    believed = 0
    for _ in range(n):
        path = rng.choice(paths)
        data = bytearray(path.read_bytes())
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged = path.with_name("damaged")
        damaged.write_bytes(data)
        with suppress(BadFile):
            read_file(damaged)
            believed += 1
        damaged.unlink()
    return believed


def main(arguments: list[str]) -> int:
    """Run it; return 0 where nothing wrong was believed and nothing half was left."""
    if arguments[:1] == ["--writer"]:
        folder, seed, *kill_at = arguments[1:]
        return write_for_ever(Path(folder), int(seed), int(kill_at[0]) if kill_at else None)
    parser = argparse.ArgumentParser(prog="python -m proof.kv_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "kv_kills.json")
    wishes = parser.parse_args(arguments)
    rng = random.Random(wishes.seed)
    head = header("kv kills", None, seed=wishes.seed, budget_bytes=BUDGET_BYTES, most_delay_s=MOST_DELAY_S)
    with tempfile.TemporaryDirectory(prefix="localllm-proof-") as name:
        at_random = end_at_random(Path(name) / "kv", wishes.kills, rng)
        n_damaged = 2 * wishes.kills
        believed = n_damaged_believed(Path(name) / "kv", n_damaged, rng)
        clear(Path(name) / "kv", at_random)
        at_calls = end_at_each_call(Path(name), wishes.calls)
    runs = {"at random moments": dict(at_random), "before each call": dict(at_calls)}
    result = {"runs": runs, "damaged": n_damaged, "damaged_believed": believed}
    write_json(wishes.output, head | result)
    tell(f"{wishes.output}")
    print(json.dumps(result, indent=1))
    n_wrong = sum(run[name] for run in (at_random, at_calls) for name in BAD) + believed
    is_short = at_random["kills"] < wishes.kills or at_calls["kills"] < wishes.calls
    is_short |= at_random["amid_a_file"] < MIN_AMID * wishes.kills or at_calls["partial_left"] < MIN_AMID * wishes.calls
    return 1 if n_wrong or is_short or at_random["bytes_left"] > 1.1 * BUDGET_BYTES else 0


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
