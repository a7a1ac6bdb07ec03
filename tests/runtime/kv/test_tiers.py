"""What is kept is found again, goes by the rules, and never holds the engine's thread up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.kv import asking, keeping
from localllm.runtime.kv import ram as ram_module
from localllm.runtime.kv import tiers as tiers_module
from localllm.runtime.kv.blocks import NO_ROOT, Block, Chain
from localllm.runtime.kv.tiers import Gone, Link, Lookup, Note, Tiers, no_tiers
from tests.fake_engine import SPEC
from tests.runtime.kv.memory_disk import MemoryDisk

SIZE = 4
CONFIG = TierConfig(ram_bytes=1 << 20, block_tokens=SIZE)
NOTE = Note(100)


def _tiers(
    disk: MemoryDisk | None = None,
    *,
    spec: EngineSpec = SPEC,
    wake: Callable[[], None] = lambda: None,
    ram_bytes: int | None = 1 << 20,
    keeps_all: bool = False,
    flush_s: float = 2.0,
) -> Tiers:
    config = replace(CONFIG, ram_bytes=ram_bytes, keeps_all=keeps_all, flush_s=flush_s)
    return Tiers(config, spec=spec, wake=wake, disk=None if disk is None else disk.as_tier)


def _blocks(tiers: Tiers, tokens: list[int]) -> list[Block]:
    chain, size = Chain(tiers.maker, NO_ROOT), tiers.block_tokens
    return [chain.block(tokens, start, min(start + size, len(tokens))) for start in range(0, len(tokens), size)]


def _blob(block: Block, n_bytes: int = 10) -> bytes:
    return block.key[:1] * n_bytes


def _put(tiers: Tiers, tokens: list[int], note: Note = NOTE) -> list[Block]:
    blocks = _blocks(tiers, tokens)
    for block in blocks:
        tiers.put(block, _blob(block), note)
    return blocks


def _taken(tiers: Tiers, lookup: Lookup, link: Link) -> bytes:
    """Wait for a block as the engine's thread does."""
    end_s = time.monotonic() + 5
    while (blob := tiers.take(lookup, link)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return blob


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end_s, "it never came to that"
        time.sleep(0.001)


def _keys(blocks: list[Block]) -> list[bytes]:
    return [block.key for block in blocks]


TOKENS = list(range(20))


def test_what_was_put_is_matched_and_taken_as_it_was() -> None:
    tiers = _tiers()
    blocks = _put(tiers, TOKENS)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, len(TOKENS) - 1)
    assert [(link.block.key, link.n_used, link.tier) for link in links] == [
        *((key, 4, "ram") for key in _keys(blocks[:4])),
        (blocks[4].key, 3, "ram"),
    ]
    assert [tiers.take(lookup, link) for link in links] == [_blob(block) for block in blocks]
    assert all(tiers.holds(key) for key in _keys(blocks))


def test_a_block_that_had_to_go_between_match_and_take_is_gone_and_remembered() -> None:
    tiers = _tiers(ram_bytes=50)
    blocks = _put(tiers, TOKENS)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    _put(tiers, [7] * 8)
    with pytest.raises(Gone):
        tiers.take(lookup, links[-1])
    assert tiers.was_evicted(blocks[4].key)
    assert not tiers.was_evicted(blocks[0].key)
    assert tiers.match(lookup, TOKENS, 20) == links[:3]


def test_only_so_many_evictions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram_module, "_REMEMBERED_KEYS", 3)
    tiers = _tiers(ram_bytes=10)
    blocks = [block for i in range(8) for block in _put(tiers, [i] * 4)]
    assert [tiers.was_evicted(block.key) for block in blocks] == [False] * 4 + [True] * 3 + [False]


def test_reading_begins_while_the_request_is_prepared_and_the_engine_finds_the_bytes_ready() -> None:
    disk = MemoryDisk()
    blocks = _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    _until(lambda: disk.n_reads == 5)
    links = tiers.match(lookup, TOKENS, 20)
    assert [link.tier for link in links] == ["disk"] * 5
    assert tiers.stats().read_ahead_bytes == 50
    assert [tiers.take(lookup, link) for link in links] == [_blob(block) for block in blocks]
    assert disk.n_reads == 5
    assert tiers.stats().read_ahead_bytes == 0
    tiers.close()


def test_a_disk_that_does_not_answer_holds_nobody_up_and_what_ram_holds_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "STEP_S", 0.1)
    disk = MemoryDisk()
    tiers = _tiers(disk)
    _put(tiers, TOKENS[:8])
    disk.may_list.clear()
    begun_s = time.monotonic()
    for _ in range(20):
        lookup = tiers.look_up(NO_ROOT, TOKENS)
        assert [link.tier for link in tiers.match(lookup, TOKENS, 19)] == ["ram"] * 2
    assert time.monotonic() - begun_s < 2, "it is waited for once"
    disk.may_list.set()
    _until(lambda: not tiers._asker.is_resting)
    _put(_tiers(disk), TOKENS)
    assert len(tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 19)) == 5
    tiers.close()


def test_who_prepares_touches_no_file() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk)
    tiers.look_up(NO_ROOT, TOKENS)
    assert disk.threads == {"localllm-kv-ask"}
    tiers.close()


def test_who_only_looks_reads_nothing() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    lookup = tiers.look_up(NO_ROOT, TOKENS, reads=False)
    assert len(tiers.match(lookup, TOKENS, 20)) == 5
    assert lookup.reading is None
    assert disk.n_reads == 0


def test_what_was_read_is_in_ram_from_then_on_under_its_budget() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk, ram_bytes=30)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    for link in tiers.match(lookup, TOKENS, 20):
        _taken(tiers, lookup, link)
        assert tiers.stats().ram_bytes <= 30
    again = tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 20)
    assert len(again) == 5
    assert [link.tier for link in again].count("ram") == 3
    tiers.close()


def test_without_ram_the_disk_is_enough() -> None:
    disk = MemoryDisk()
    blocks = _put(_tiers(disk, ram_bytes=0), TOKENS)
    tiers = _tiers(disk, ram_bytes=0)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    assert [_taken(tiers, lookup, link) for link in links] == [_blob(block) for block in blocks]
    assert tiers.stats().n_ram_evicted == 0
    tiers.close()


def test_who_waits_for_a_block_is_woken_when_it_comes() -> None:
    disk, woken = MemoryDisk(), threading.Event()
    _put(_tiers(disk), TOKENS)
    disk.may_read.clear()
    tiers = _tiers(disk, wake=woken.set)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    link = tiers.match(lookup, TOKENS, 20)[0]
    assert tiers.take(lookup, link) is None
    assert not woken.is_set()
    disk.may_read.set()
    assert woken.wait(5)
    assert tiers.take(lookup, link) == _blob(link.block)
    tiers.close()


def test_a_block_that_left_ram_for_good_reason_is_read_from_disk_again() -> None:
    """The lookup was made while RAM held it; eviction prefers just those that lie on disk."""
    disk = MemoryDisk()
    tiers = _tiers(disk, ram_bytes=50)
    blocks = _put(tiers, TOKENS)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    _put(tiers, [7] * 20)
    assert [_taken(tiers, lookup, link) for link in links] == [_blob(block) for block in blocks]
    tiers.close()


def test_after_it_was_forgotten_a_lookup_reads_ahead_anew() -> None:
    disk = MemoryDisk()
    blocks = _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    _until(lambda: disk.n_reads == 5)
    tiers.forget(lookup)
    tiers.forget(lookup)
    assert tiers.stats().read_ahead_bytes == 0
    assert tiers.take(lookup, links[1]) is None
    _until(lambda: disk.n_reads == 9)  # what follows, too; a part of a block only when asked for
    assert disk.reads[5:] == _keys(blocks[1:])
    assert [_taken(tiers, lookup, link) for link in links[1:]] == [_blob(block) for block in blocks[1:]]
    tiers.close()


def test_a_file_that_is_gone_ends_the_prefix_where_it_was() -> None:
    disk = MemoryDisk()
    blocks = _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    disk.may_read.clear()
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    disk.lose(blocks[2].key)
    disk.may_read.set()
    _taken(tiers, lookup, links[1])
    with pytest.raises(Gone):
        _taken(tiers, lookup, links[2])
    assert len(tiers.match(lookup, TOKENS, 20)) == 2
    tiers.close()


def test_what_the_disk_loses_or_gains_is_known_at_the_next_match() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk, ram_bytes=0)
    blocks = _put(tiers, TOKENS)
    lookup = tiers.look_up(NO_ROOT, TOKENS, reads=False)
    assert len(tiers.match(lookup, TOKENS, 20)) == 5
    disk.lose(blocks[2].key)
    assert len(tiers.match(lookup, TOKENS, 20)) == 2
    tiers.put(blocks[2], _blob(blocks[2]), NOTE)
    assert len(tiers.match(lookup, TOKENS, 20)) == 5


def test_what_another_sequence_brought_to_ram_is_not_kept_ready_as_well() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    lookups = [tiers.look_up(NO_ROOT, TOKENS) for _ in range(2)]
    _until(lambda: tiers.stats().read_ahead_bytes == 100)
    for lookup in lookups:
        for link in tiers.match(lookup, TOKENS, 20):
            _taken(tiers, lookup, link)
    assert tiers.stats().read_ahead_bytes == 0
    assert disk.n_reads == 5
    tiers.close()


def test_blocks_that_are_used_outlast_those_that_are_not() -> None:
    tiers = _tiers(ram_bytes=60)
    old, new = _put(tiers, [1] * 12), _put(tiers, [2] * 12)
    tiers.used(_keys(old))
    _put(tiers, [3] * 12)
    assert [tiers.holds(block.key) for block in (*old, *new)] == [True] * 3 + [False] * 3


def test_a_second_use_is_told_to_the_disk_and_a_private_request_is_none() -> None:
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: is_second_use
    tiers = _tiers(disk)
    blocks = _put(tiers, TOKENS)
    tiers.used(_keys(blocks[:3]), is_private=True)
    assert (disk.writes, disk.touched) == ([], [])
    tiers.used(_keys(blocks[:2]))
    assert disk.writes == [(key, True, False) for key in _keys(blocks[:2])]
    tiers.used(_keys(blocks))
    assert sorted(disk.touched) == sorted([*_keys(blocks[:2]), *_keys(blocks)])
    assert disk.writes == [(key, True, False) for key in _keys(blocks)]


def test_a_block_that_was_computed_again_because_it_had_to_go_is_used_a_second_time() -> None:
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: is_second_use
    tiers = _tiers(disk, ram_bytes=20)
    _put(tiers, [1] * 8)
    _put(tiers, [2] * 8)
    assert disk.writes == []
    blocks = _put(tiers, [1] * 8)
    assert disk.writes == [(key, True, False) for key in _keys(blocks)]


def test_private_blocks_are_shared_in_ram_and_never_reach_the_disk() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk, keeps_all=True)
    blocks = _put(tiers, TOKENS, Note(2000, is_private=True))
    tiers.used(_keys(blocks), is_private=True)
    assert len(tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 20)) == 5
    tiers.close()
    assert disk.blocks == {}


def test_a_private_block_that_somebody_else_has_too_is_private_no_more() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk, keeps_all=True)
    blocks = _put(tiers, TOKENS, Note(2000, is_private=True))
    tiers.used(_keys(blocks[:2]))
    tiers.put(blocks[2], _blob(blocks[2]), NOTE)
    tiers.put(blocks[0], _blob(blocks[0]), Note(2000, is_private=True))
    tiers.close()
    assert set(disk.blocks) == set(_keys(blocks[:3]))


def test_a_block_used_in_part_is_touched_and_no_more() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk, ram_bytes=60)
    blocks = _put(tiers, TOKENS[:12], Note(2000, is_private=True))
    disk.blocks[blocks[1].key] = blocks[1], b""
    tiers.used(_keys(blocks[:1]), blocks[1].key)
    assert set(disk.blocks) == set(_keys(blocks[:2]))
    assert set(disk.touched) == set(_keys(blocks[:2]))
    assert [tiers._ram.get(block.key).note.is_private for block in blocks] == [False, True, True]  # type: ignore[union-attr]


def test_what_is_written_of_a_private_block_does_not_say_how_long_its_prompt_was() -> None:
    tiers = _tiers()
    blocks = _put(tiers, TOKENS[:8], Note(2000, is_private=True))
    tiers.used(_keys(blocks[:1]))
    tiers.put(blocks[1], _blob(blocks[1]), Note(9))
    assert [tiers._ram.get(block.key).note.prefix_tokens for block in blocks] == [4, 9]  # type: ignore[union-attr]


def test_a_private_pin_of_what_others_have_writes_nothing() -> None:
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: is_second_use
    tiers = _tiers(disk)
    blocks = _put(tiers, TOKENS)
    disk.takes = lambda block, is_second_use: True
    _put(tiers, TOKENS, Note(2000, is_private=True, is_pinned=True))
    assert disk.writes == []
    tiers.put(blocks[0], _blob(blocks[0]), NOTE)  # the control
    assert disk.writes == [(blocks[0].key, False, False)]


def test_pinned_blocks_are_written_at_once_and_outlast_all_others() -> None:
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: False
    tiers = _tiers(disk, ram_bytes=60)
    blocks = _put(tiers, TOKENS[:16])
    disk.takes = lambda block, is_second_use: True
    for block in blocks:
        tiers.put(block, _blob(block), Note(16, is_pinned=True))
    assert disk.writes == [(key, False, True) for key in _keys(blocks)]
    for i in range(30):
        _put(tiers, [100 + i] * 8)
    tiers.put(blocks[0], _blob(blocks[0]), NOTE)
    for i in range(30):
        _put(tiers, [200 + i] * 8)
    links = tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 16)
    assert [link.tier for link in links] == ["ram"] * 4


def test_a_block_with_its_window_replaces_one_without_and_never_the_other_way() -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=4)
    tiers = _tiers(spec=spec)
    blocks = _blocks(tiers, TOKENS[:8])
    for block in blocks:
        tiers.put(replace(block, is_bare=True), b"bare", NOTE)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    assert tiers.match(lookup, TOKENS, 19) == ()
    tiers.put(blocks[1], b"full", NOTE)
    links = tiers.match(lookup, TOKENS, 19)
    assert [tiers.take(lookup, link) for link in links] == [b"bare", b"full"]
    tiers.put(replace(blocks[1], is_bare=True), b"bare", NOTE)
    assert tiers.match(lookup, TOKENS, 19) == links
    assert tiers.take(lookup, links[1]) == b"full"


def test_a_link_to_a_block_with_its_window_is_never_served_one_without() -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=4)
    tiers = _tiers(spec=spec)
    (block,) = _put(tiers, TOKENS[:4])
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    (link,) = tiers.match(lookup, TOKENS, 19)
    tiers.clear()
    tiers.put(replace(block, is_bare=True), b"bare", NOTE)
    with pytest.raises(Gone):
        tiers.take(lookup, link)


def test_a_block_without_its_window_does_not_stand_before_the_whole_one_on_disk() -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=4)
    disk = MemoryDisk()
    tiers = _tiers(disk, spec=spec)
    (block,) = _blocks(tiers, TOKENS[:4])
    tiers.put(block, b"full", NOTE)
    tiers.limit_ram(0)
    tiers.limit_ram(1 << 20)
    tiers.put(replace(block, is_bare=True), b"bare", NOTE)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    (link,) = tiers.match(lookup, TOKENS, 19)
    while (blob := tiers.take(lookup, link)) is None:
        time.sleep(0.001)
    assert blob == b"full"
    tiers.close()


def test_what_is_but_the_beginning_of_another_block_goes_when_that_comes() -> None:
    tiers = _tiers()
    (short,) = _blocks(tiers, TOKENS[:3])
    (pinned,) = _blocks(tiers, TOKENS[:2])
    (other,) = _blocks(tiers, [9, 9, 9])
    tiers.put(pinned, b"a", Note(2, is_pinned=True))
    for block in (short, other):
        tiers.put(block, b"b", NOTE)
    tiers.put(_blocks(tiers, TOKENS[:4])[0], b"c", Note(4, is_private=True))
    assert tiers.holds(short.key)  # the longer one will never be written
    tiers.put(_blocks(tiers, TOKENS[:4])[0], b"c", NOTE)
    assert [tiers.holds(block.key) for block in (short, pinned, other)] == [False, True, True]
    assert not tiers.was_evicted(short.key)


def test_where_blocks_are_used_whole_a_beginning_stays() -> None:
    tiers = _tiers(spec=replace(SPEC, cut_tokens=SIZE))
    (short,) = _put(tiers, TOKENS[:3])
    _put(tiers, TOKENS[:4])
    assert tiers.holds(short.key)


def test_refused_bytes_are_set_aside_on_another_thread_and_found_no_more() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk)
    blocks = _put(tiers, TOKENS)
    tiers.refused(blocks[1])
    _until(lambda: disk.aside == [blocks[1].key])
    assert disk.threads == {"localllm-kv-read"}
    assert len(tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 20)) == 1
    tiers.close()


def test_the_engines_thread_touches_no_file() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk, ram_bytes=30)
    lookups = [tiers.look_up(NO_ROOT, TOKENS[:n]) for n in (20, 11, 3)]
    disk.threads.clear()

    def engine() -> None:
        for lookup in (*lookups, tiers.blank(NO_ROOT)):
            links = tiers.match(lookup, TOKENS, 20)
            for link in links:
                _taken(tiers, lookup, link)
            tiers.used([link.block.key for link in links])
            tiers.forget(lookup)
        for block in _put(tiers, [5] * 12):
            tiers.holds(block.key)
            tiers.refused(block)

    thread = threading.Thread(target=engine, name="engine")
    thread.start()
    thread.join(10)
    tiers.close()
    assert disk.n_reads > 0
    assert disk.threads == {"localllm-kv-read"}


def test_a_cleared_tier_knows_nothing_and_those_at_work_find_their_blocks_gone() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk, ram_bytes=30)
    blocks = _put(tiers, [5] * 20)
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    links = tiers.match(lookup, TOKENS, 20)
    _until(lambda: tiers.stats().read_ahead_bytes == 50)
    cleared = tiers.clear()
    assert (cleared.n_ram_blocks, cleared.n_disk_blocks) == (3, 10)
    for link in links:
        with pytest.raises(Gone):
            tiers.take(lookup, link)
    assert tiers.match(lookup, TOKENS, 20) == ()
    assert not tiers.was_evicted(blocks[4].key)
    assert tiers.stats().read_ahead_bytes == tiers.stats().ram_bytes == 0
    tiers.close()


@pytest.mark.parametrize("keeps_all", [True, False])
def test_closing_writes_what_only_ram_holds_where_that_is_asked_for(keeps_all: bool) -> None:
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: is_second_use
    tiers = _tiers(disk, keeps_all=keeps_all)
    blocks = _put(tiers, TOKENS)
    tiers.close()
    tiers.close()
    assert [key for key, _, _ in disk.writes] == (_keys(blocks) if keeps_all else [])
    assert disk.is_closed


def test_closing_writes_no_longer_than_it_may() -> None:
    disk = MemoryDisk()

    def slow(block: Block, is_second_use: bool) -> bool:
        time.sleep(0.03 if is_second_use else 0)
        return is_second_use

    disk.takes = slow
    tiers = _tiers(disk, keeps_all=True, flush_s=0.1)
    _put(tiers, [1] * 400)
    started_s = time.monotonic()
    tiers.close()
    assert time.monotonic() - started_s < 1
    assert 0 < len(disk.writes) < 20


def test_a_request_that_comes_after_closing_is_told_that_nothing_can_be_read() -> None:
    disk = MemoryDisk()
    _put(_tiers(disk), TOKENS)
    tiers = _tiers(disk)
    tiers.close()
    lookup = tiers.look_up(NO_ROOT, TOKENS)
    for link in tiers.match(lookup, TOKENS, 20):
        with pytest.raises(Gone):
            tiers.take(lookup, link)


def test_when_memory_is_short_the_tier_gives_up_half_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, left = list[float](), [100]
    clock = [1000.0]
    monkeypatch.setattr(keeping, "total_bytes", lambda: 1000)
    monkeypatch.setattr(keeping, "available_bytes", lambda: asked.append(clock[0]) or left[0])
    monkeypatch.setattr(keeping.time, "monotonic", lambda: clock[0])
    tiers = _tiers()
    _put(tiers, TOKENS)
    assert tiers.stats().ram_bytes == 50
    left[0] = 49
    _put(tiers, TOKENS)
    assert tiers.stats().ram_bytes == 50
    clock[0] += 1.1
    _put(tiers, [7] * 4)
    assert tiers.stats().ram_bytes == 30
    assert len(asked) == 2


def test_where_nobody_says_ram_takes_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "available_bytes", lambda: 4000)
    assert _tiers(ram_bytes=None).stats().ram_limit_bytes == 1000


def test_no_tiers_keep_nothing_and_find_nothing() -> None:
    tiers = no_tiers(SPEC)
    blocks = _put(tiers, TOKENS)
    tiers.used(_keys(blocks))
    tiers.refused(blocks[0])
    assert not tiers.is_on
    assert tiers.match(tiers.look_up(NO_ROOT, TOKENS), TOKENS, 20) == ()
    assert not tiers.holds(blocks[0].key)
    tiers.close()


def test_another_root_finds_nothing_in_either_tier() -> None:
    disk = MemoryDisk()
    tiers = _tiers(disk, ram_bytes=30)
    _put(tiers, TOKENS)
    for root in (("adapter", ""), ("", "salt")):
        assert tiers.match(tiers.look_up(root, TOKENS), TOKENS, 20) == ()
    tiers.close()


def test_a_real_folder_gives_back_what_was_put_and_nothing_under_another_engine(tmp_path: Path) -> None:
    config = replace(CONFIG, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 20, keeps_all=True)
    first = Tiers(config, spec=SPEC, model_name="m", can_write_disk=True)
    blocks = _put(first, TOKENS)
    first.close()
    second = Tiers(config, spec=SPEC, model_name="m", can_write_disk=True)
    lookup = second.look_up(NO_ROOT, TOKENS)
    links = second.match(lookup, TOKENS, 19)
    assert [(link.tier, link.n_used) for link in links] == [("disk", 4)] * 4 + [("disk", 3)]
    assert [_taken(second, lookup, link) for link in links] == [_blob(block) for block in blocks]
    second.close()
    third = Tiers(config, spec=replace(SPEC, fingerprint="other"), model_name="m", can_write_disk=True)
    assert third.match(third.look_up(NO_ROOT, TOKENS), TOKENS, 19) == ()
    third.close()


@pytest.mark.parametrize("ram_bytes", [0, 400, 1 << 20])
def test_threads_that_look_up_use_put_refuse_and_clear_at_once_only_ever_see_right_bytes(ram_bytes: int) -> None:
    """The engine's thread and those that prepare requests, over one disk on which files come and go."""
    disk, wrong, ended = MemoryDisk(), list[object](), threading.Event()
    tiers = _tiers(disk, ram_bytes=ram_bytes)
    handed = list[tuple[Lookup, list[int]]]()

    def sequence(rng: random.Random) -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 22))]

    def prepares(seed: int) -> None:
        rng = random.Random(seed)
        while not ended.is_set():
            tokens = sequence(rng)
            handed.append((tiers.look_up(NO_ROOT, tokens, reads=rng.random() < 0.8), tokens))
            tiers.followers(tiers.blank(NO_ROOT).chain.root_key)
            time.sleep(0)

    def disturbs() -> None:
        rng = random.Random(99)
        while not ended.is_set():
            keys = list(disk.blocks)
            if keys:
                disk.lose(rng.choice(keys))
            if rng.random() < 0.01:
                tiers.clear()
            tiers.stats()
            time.sleep(0.0005)

    def engine() -> None:
        rng = random.Random(7)
        while not ended.is_set():
            tokens = sequence(rng)
            for block in _blocks(tiers, tokens):
                tiers.put(block, repr(tokens[: block.end]).encode(), Note(len(tokens), rng.random() < 0.2))
            if not handed:
                continue
            lookup, tokens = handed.pop()
            links = tiers.match(lookup, tokens, len(tokens) - 1)
            try:
                for link in links:
                    if rng.random() < 0.05:
                        tiers.refused(link.block)
                    of = eval(_taken(tiers, lookup, link).decode())
                    if of[: link.end] != tokens[: link.end]:
                        wrong.append((of, tokens, link))
            except Gone:
                pass
            tiers.used([link.block.key for link in links], is_private=rng.random() < 0.2)
            if rng.random() < 0.9:
                tiers.forget(lookup)

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                wrong.append(error)
                ended.set()

        return run

    before = set(threading.enumerate())
    works = [lambda: prepares(1), lambda: prepares(2), disturbs, engine]
    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    ended.wait(0.7)
    ended.set()
    for thread in threads:
        thread.join(10)
    tiers.close()
    assert wrong == []
    assert tiers.stats().ram_bytes <= ram_bytes
    assert disk.n_reads > 0
    assert set(threading.enumerate()) <= before


def test_a_limit_that_shrinks_is_kept_at_once() -> None:
    tiers = _tiers()
    blocks = _put(tiers, TOKENS)
    tiers.limit_ram(20)
    assert tiers.stats().ram_bytes == 20
    assert [tiers.was_evicted(key) for key in _keys(blocks)] == [False] * 2 + [True] * 3
