"""A prefix that stops coming back half way leaves nobody behind cells of a window that are missing: all is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EditOutcome, EditResult, Restore
from localllm.runtime.kv.blocks import Block
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Gone, Link, Lookup, Tiers
from localllm.runtime.slots import usable_cut
from localllm.runtime.stream import TokenStream, collect
from tests.fake_engine import FakeEngine, FakeSlot
from tests.runtime.harness import SPECS, Bench, truth

RAM = TierConfig(ram_bytes=1 << 24, block_tokens=16)
WINDOW = SPECS["window"]  # of 24 tokens
N_PROMPT = 200
BARE = range(32, 96, 16)  # starts of the blocks without cells of their window: from 120 on a prefix is sound again
AT = (48, 96, 112, 128, 176)  # starts of the blocks that do not come


def _prompt(seed: int, n: int = N_PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(32, 126) for _ in range(n)]


def _known(prompt: list[int]) -> Tiers:
    """Return tiers that know a prompt, some blocks in its middle bare."""
    tiers = Tiers(RAM, spec=WINDOW)
    Bench(FakeEngine(WINDOW), tiers=tiers).answer(prompt, max_tokens=2)
    for entry in tiers._ram:
        if entry.block.start in BARE:
            entry.block, entry.blob = _bared(entry.block, entry.blob)
    return tiers


def _bared(block: Block, blob: bytes) -> tuple[Block, bytes]:
    """Return a block as it is exported when its window's cells are gone."""
    parts = np.frombuffer(blob, np.int32).copy()
    parts[1] = block.n_tokens
    return replace(block, is_bare=True), parts.tobytes()


class Short(FakeEngine):
    """Has no room for the block that begins at `at`, once."""

    at = -1

    def _restore(self, slot: FakeSlot, edit: Restore) -> EditResult:
        if edit.start != self.at:
            return super()._restore(slot, edit)
        self.at = -1
        slot.is_short = True
        return EditResult(len(slot.tokens), slot.first_held, EditOutcome.NO_ROOM)


def _gone(bench: Bench, at: int) -> None:
    take = bench.tiers.take

    def without(lookup: Lookup, link: Link) -> bytes | None:
        if link.block.start == at:
            raise Gone
        return take(lookup, link)

    bench.tiers.take = without  # type: ignore[method-assign]


def _late(bench: Bench, at: int) -> None:
    take = bench.tiers.take
    bench.tiers.take = lambda lookup, link: None if link.block.start == at else take(lookup, link)  # type: ignore[method-assign]
    bench.tiers.waited_s = lambda lookup: 1e9  # type: ignore[method-assign]


def _no_cells(bench: Bench, at: int) -> None:
    restore = bench.scheduler._room.restore
    bench.scheduler._room.restore = (  # type: ignore[method-assign]
        lambda sequence, link, blob: link.block.start != at and restore(sequence, link, blob)
    )


def _refused(bench: Bench, at: int) -> None:
    bench.engine._refuses = lambda edit: isinstance(edit, Restore) and edit.start == at


def _no_room(bench: Bench, at: int) -> None:
    assert isinstance(bench.engine, Short)
    bench.engine.at = at


STOPS: dict[str, Callable[[Bench, int], None]] = {
    "gone": _gone,
    "late": _late,
    "no cells": _no_cells,
    "refused": _refused,
    "no room": _no_room,
}


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("pace", ["at once", "block by block"])
def test_a_window_that_came_back_in_part_is_computed_anew(stop: str, at: int, pace: str) -> None:
    prompt = _prompt(1)
    bench = Bench(Short(WINDOW), tiers=_known(prompt))
    if pace == "block by block":
        bench.cost.restore_s = lambda n_tokens: 9.0 * n_tokens  # type: ignore[method-assign]
    STOPS[stop](bench, at)
    streams = [bench.submit([*prompt, 40 + i], max_tokens=6) for i in range(3)]
    bench.run()
    answers = [collect(stream) for stream in streams]
    assert [a.choices[0].ids for a in answers] == [truth([*prompt, 40 + i], 6) for i in range(3)]
    n_kept = at if at >= 120 else 0  # what is sound is not computed
    assert sum(answers[0].usage.cached_tokens.values()) == n_kept
    assert bench.answer(prompt, max_tokens=6).choices[0].ids == truth(prompt, 6)


def test_the_control_all_of_it_comes_back() -> None:
    prompt = _prompt(1)
    bench = Bench(FakeEngine(WINDOW), tiers=_known(prompt))
    assert bench.answer([*prompt, 40], max_tokens=6).usage.cached_tokens["ram"] >= 192


def test_nothing_is_copied_of_what_is_only_planned_to_come_back_bare() -> None:
    prompt = _prompt(2)
    bench = Bench(FakeEngine(WINDOW), tiers=_known(prompt))
    bench.cost.restore_s = lambda n_tokens: n_tokens * 0.25 / 80  # type: ignore[method-assign]
    bench.submit(prompt, max_tokens=2)
    for message in bench.loop.inbox.receive(0):
        bench.loop._apply(message)
    assert bench.scheduler.plan({}) is not None
    (sequence,) = bench.scheduler._running
    slot = sequence.slot
    assert slot is not None
    assert slot.n_held == 80
    assert usable_cut(WINDOW, slot, 80, can_take_over=False).n_tokens == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_bare_blocks_and_of_what_goes_wrong_answers_right(seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(WINDOW, pool_tokens=rng.choice([300, 500, 1200]), n_slots=rng.choice([3, 5, 9]))
    tiers, documents = Tiers(RAM, spec=spec), [_prompt(100 + i, 150) for i in range(3)]
    for document in documents:
        Bench(FakeEngine(spec), tiers=tiers).answer(document, max_tokens=2)
    put = tiers.put

    def put_bare(block: Block, blob: bytes, note: Note) -> None:
        put(*(_bared(block, blob) if rng.random() < 0.3 else (block, blob)), note)

    tiers.put = put_bare  # type: ignore[method-assign]
    take = tiers.take

    def take_or_not(lookup: Lookup, link: Link) -> bytes | None:
        if rng.random() < 0.05:
            raise Gone
        return take(lookup, link)

    tiers.take = take_or_not  # type: ignore[method-assign]
    for entry in tiers._ram:
        if rng.random() < 0.4:
            entry.block, entry.blob = _bared(entry.block, entry.blob)
    bench = Bench(
        FakeEngine(
            spec,
            short_rooms={rng.randint(5, 200) for _ in range(6)},
            refuses=lambda edit: isinstance(edit, Restore) and rng.random() < 0.05,
        ),
        tiers=tiers,
    )
    if rng.random() < 0.5:
        bench.cost.restore_s = lambda n_tokens: n_tokens * rng.choice([0.001, 0.01, 9.0])  # type: ignore[method-assign]
    prompts = [[*rng.choice(documents)[: rng.randint(20, 150)], 40 + i % 50, 33] for i in range(40)]
    streams = list[TokenStream]()

    def feed(n: int) -> None:
        if len(streams) < len(prompts) and rng.random() < 0.4:
            streams.append(bench.submit(prompts[len(streams)], max_tokens=8))
        if streams and rng.random() < 0.03:
            streams[rng.randrange(len(streams))].cancel()

    while len(streams) < len(prompts):
        feed(0)
        bench.run(each_step=feed)
    for prompt, stream in zip(prompts, streams, strict=True):
        ids = collect(stream).choices[0].ids
        assert ids == truth(prompt, 8)[: len(ids)]
