"""Blocks are read ahead, once for all who want them, for those at work first, and never for nobody."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from localllm.runtime.kv import reading
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.reading import Reader, Reading


class Shelf:
    """Where blocks are read from: each read is noted, and waits while the gate is shut."""

    def __init__(self) -> None:
        self.read_keys: list[Key] = []
        self.gate = threading.Event()
        self.gate.set()
        self.gone: set[Key] = set()
        self.broken: set[Key] = set()
        self.in_ram: set[Key] = set()
        self.n_wakes = 0

    def read(self, block: Block) -> bytes | None:
        self.read_keys.append(block.key)
        assert self.gate.wait(10)
        if block.key in self.broken:
            raise RuntimeError("broken")
        return None if block.key in self.gone else block.key * 10

    def wake(self) -> None:
        self.n_wakes += 1


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def reader(shelf: Shelf) -> Iterator[Reader]:
    before = set(threading.enumerate())
    made = Reader(shelf.read, lambda key: key in shelf.in_ram, shelf.wake, 1 << 20)
    yield made
    shelf.gate.set()
    made.close()
    assert set(threading.enumerate()) <= before


def _blocks(name: str, n: int) -> list[Block]:
    keys = [f"{name}{i}".encode() for i in range(n)]
    return [Block(key, b"", 4 * i, 4) for i, key in enumerate(keys)]


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end_s, "it never came to that"
        time.sleep(0.001)


def _wait_for(work: Reading, block: Block) -> bytes:
    end_s = time.monotonic() + 5
    while (blob := work.take(block)) is None:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return blob


def test_blocks_come_in_order_before_anybody_asks_and_are_handed_over_once(reader: Reader, shelf: Shelf) -> None:
    blocks = _blocks("a", 5)
    work = reader.begin(blocks)
    _until(lambda: len(shelf.read_keys) == 5)
    assert shelf.read_keys == [block.key for block in blocks]
    assert [_wait_for(work, block) for block in blocks] == [block.key * 10 for block in blocks]
    assert work.held_bytes == 0
    assert _wait_for(work, blocks[0]) == blocks[0].key * 10  # asked again: read again
    assert len(shelf.read_keys) == 6


def test_only_who_asked_in_vain_is_woken(reader: Reader, shelf: Shelf) -> None:
    first, second = _blocks("a", 2)
    work = reader.begin([first])
    _until(lambda: work.held_bytes > 0)
    assert shelf.n_wakes == 0
    shelf.gate.clear()
    assert work.take(second) is None
    shelf.gate.set()
    _until(lambda: shelf.n_wakes == 1)
    assert work.take(second) == second.key * 10


def test_reading_ahead_is_bounded_for_one_sequence_and_goes_on_as_it_takes(
    reader: Reader, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 50)
    blocks = _blocks("a", 9)  # of 20 bytes
    work = reader.begin(blocks)
    _until(lambda: len(shelf.read_keys) == 3)
    time.sleep(0.02)
    assert len(shelf.read_keys) == 3
    assert work.take(blocks[0])
    _until(lambda: len(shelf.read_keys) == 4)
    assert [_wait_for(work, block) for block in blocks[1:]]
    assert work.held_bytes == 0


def test_reading_ahead_is_bounded_for_all_together_but_not_for_who_is_at_work(shelf: Shelf) -> None:
    reader = Reader(shelf.read, lambda key: False, shelf.wake, 50)
    works = [reader.begin(_blocks(name, 3)) for name in "abcd"]
    _until(lambda: len(shelf.read_keys) == 3)
    time.sleep(0.02)
    assert reader.held_bytes == 60
    last = _blocks("d", 3)
    assert _wait_for(works[3], last[0])
    _until(lambda: works[3].held_bytes == 40)  # it is read ahead for, from now on
    assert [works[3].take(block) for block in last[1:]] == [block.key * 10 for block in last[1:]]
    assert len(shelf.read_keys) == 6
    reader.close()


def test_who_is_at_work_is_served_before_those_who_wait_in_the_queue(reader: Reader, shelf: Shelf) -> None:
    shelf.gate.clear()
    queued, at_work = _blocks("q", 4), _blocks("w", 2)
    first = reader.begin(queued)
    _until(lambda: len(shelf.read_keys) == 1)
    work = reader.begin(at_work)
    assert work.take(at_work[0]) is None
    shelf.gate.set()
    _until(lambda: len(shelf.read_keys) == 6)
    assert shelf.read_keys == [queued[0].key, *(block.key for block in (*at_work, *queued[1:]))]
    assert first.held_bytes > 0


def test_what_was_asked_for_in_vain_is_read_in_that_order(reader: Reader, shelf: Shelf) -> None:
    """Else two of three would be served in turn, and the third not before one of them has all."""
    shelf.gate.clear()
    works = [reader.begin(_blocks(name, 3)) for name in "abc"]
    _until(lambda: len(shelf.read_keys) == 1)
    for at in (2, 0, 1):
        assert works[at].take(_blocks("abc"[at], 3)[1]) is None
        time.sleep(0.002)
        assert works[2].take(_blocks("c", 3)[1]) is None  # to ask again does not put it back
    shelf.gate.set()
    _until(lambda: len(shelf.read_keys) == 9)
    assert shelf.read_keys[:4] == [b"a0", b"c1", b"a1", b"b1"]


def test_a_wait_is_counted_from_the_asking_and_anew_with_whatever_is_read(shelf: Shelf) -> None:
    turns = threading.Semaphore(0)

    def read(block: Block) -> bytes | None:
        assert turns.acquire(timeout=10)
        return shelf.read(block)

    reader = Reader(read, lambda key: False, shelf.wake, 1 << 20)
    first, second = reader.begin(_blocks("a", 2)), reader.begin(_blocks("b", 2))
    time.sleep(0.05)
    assert reader.waited_s(first) == reader.waited_s(second) == 0
    assert second.take(_blocks("b", 2)[0]) is None
    assert reader.waited_s(second) < 0.2
    time.sleep(0.2)
    assert reader.waited_s(second) >= 0.2
    turns.release()  # another's
    _until(lambda: first.held_bytes > 0)
    assert reader.waited_s(second) < 0.2
    turns.release()
    _until(lambda: second.held_bytes > 0)
    assert reader.waited_s(second) == 0
    turns.release(9)
    reader.close()


def test_a_block_that_several_wait_for_is_read_once(reader: Reader, shelf: Shelf) -> None:
    blocks = _blocks("a", 3)
    shelf.gate.clear()
    works = [reader.begin(blocks) for _ in range(4)]
    shelf.gate.set()
    _until(lambda: all(work.held_bytes == 60 for work in works))
    late = reader.begin(blocks)
    for work in (*works, late):
        assert [work.take(block) for block in blocks] == [block.key * 10 for block in blocks]
    assert len(shelf.read_keys) == 3


def test_what_cannot_be_had_is_said_once_for_all_and_nothing_after_it_is_read(reader: Reader, shelf: Shelf) -> None:
    blocks = _blocks("a", 5)
    shelf.gone.add(blocks[2].key)
    shelf.gate.clear()
    works = [reader.begin(blocks), reader.begin(blocks)]
    shelf.gate.set()
    for work in works:
        assert [_wait_for(work, block) for block in blocks[:2]]
        with pytest.raises(KeyError):
            _wait_for(work, blocks[2])
        with pytest.raises(KeyError):
            work.take(blocks[2])
    time.sleep(0.02)
    assert shelf.read_keys == [block.key for block in blocks[:3]]


def test_a_read_that_breaks_is_one_that_gives_nothing_and_the_next_goes_on(reader: Reader, shelf: Shelf) -> None:
    broken, good = _blocks("a", 1), _blocks("b", 1)
    shelf.broken.add(broken[0].key)
    work = reader.begin(broken)
    with pytest.raises(KeyError):
        _wait_for(work, broken[0])
    assert _wait_for(reader.begin(good), good[0])


def test_what_came_into_ram_meanwhile_is_not_read_and_who_waits_is_woken(reader: Reader, shelf: Shelf) -> None:
    first, second, third = _blocks("a", 3)
    shelf.gate.clear()
    work = reader.begin([first, second, third])
    _until(lambda: len(shelf.read_keys) == 1)
    shelf.in_ram.add(second.key)
    assert work.take(second) is None
    shelf.gate.set()
    _until(lambda: shelf.n_wakes == 1)
    work.skip(second.key)
    assert _wait_for(work, third)
    assert second.key not in shelf.read_keys


def test_what_was_had_otherwise_makes_room_for_more(
    reader: Reader, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_AHEAD_BYTES", 30)
    blocks = _blocks("a", 6)
    work = reader.begin(blocks)
    for i, block in enumerate(blocks):
        _until(lambda i=i: len(shelf.read_keys) > i)  # type: ignore[misc]
        work.skip(block.key)
    assert work.held_bytes == 0


def test_stopping_lets_go_of_all_and_reads_no_more(reader: Reader, shelf: Shelf) -> None:
    shelf.gate.clear()
    blocks = _blocks("a", 4)
    work = reader.begin(blocks)
    _until(lambda: len(shelf.read_keys) == 1)
    work.stop()
    work.stop()
    shelf.gate.set()
    other = _blocks("b", 1)
    assert _wait_for(reader.begin(other), other[0])
    assert shelf.read_keys == [blocks[0].key, other[0].key]
    assert work.held_bytes == 0
    with pytest.raises(KeyError):
        work.take(blocks[0])


def test_who_goes_away_without_a_word_leaves_nothing_behind(reader: Reader, shelf: Shelf) -> None:
    blocks = _blocks("a", 3)
    works = [reader.begin(blocks)]
    _until(lambda: works[0].held_bytes == 60)
    works.clear()
    gc.collect()
    assert reader.held_bytes == 0


def test_chores_are_done_on_the_readers_thread_before_reads_even_if_one_fails(reader: Reader, shelf: Shelf) -> None:
    done = list[str]()

    def fail() -> None:
        raise OSError("no")

    reader.later(fail)
    reader.later(lambda: done.append(threading.current_thread().name))
    _until(lambda: done == ["localllm-kv-read"])


def test_closing_ends_all_waits_and_a_disk_that_hangs_holds_nobody_up(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_LAST_READ_S", 0.05)
    before = set(threading.enumerate())
    reader = Reader(shelf.read, lambda key: False, shelf.wake, 1 << 20)
    shelf.gate.clear()
    (block,) = _blocks("a", 1)
    work = reader.begin([block])
    _until(lambda: len(shelf.read_keys) == 1)
    started_s = time.monotonic()
    reader.close()
    reader.close()
    assert time.monotonic() - started_s < 2
    with pytest.raises(KeyError):
        work.take(block)
    with pytest.raises(KeyError):
        reader.begin([block]).take(block)
    shelf.gate.set()
    _until(lambda: set(threading.enumerate()) <= before)


def test_many_threads_take_what_they_asked_for(shelf: Shelf) -> None:
    """Whoever begins, takes, skips and stops at the same time: bytes are always those of the block asked for."""
    reader = Reader(shelf.read, lambda key: False, shelf.wake, 1 << 20)
    wrong = list[object]()

    def work(number: int) -> None:
        try:
            for turn in range(40):
                blocks = _blocks("ab"[(number + turn) % 2], 6)
                mine = reader.begin(blocks)
                for block in blocks[: 1 + (number + turn) % 6]:
                    if (number * turn) % 5 == 4:
                        mine.skip(block.key)
                    elif _wait_for(mine, block) != block.key * 10:
                        wrong.append(block)
                if turn % 2:
                    mine.stop()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    gc.collect()
    assert reader.held_bytes == 0
    reader.close()
