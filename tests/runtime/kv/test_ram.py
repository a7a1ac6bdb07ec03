"""The byte budget holds, and what goes is what is of least use."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.kv.blocks import NO_ROOT, Chain, Key, KeyMaker
from localllm.runtime.kv.ram import Entry, Note, RamTier

MAKER = KeyMaker("engine", b"s" * 32, block_tokens=4)


def _entries(document: int, n_blocks: int, n_bytes: int = 10, *, pinned: bool = False) -> list[Entry]:
    tokens, chain = [document] * (4 * n_blocks), Chain(MAKER, NO_ROOT)
    blocks = [chain.block(tokens, 4 * i, 4 * i + 4) for i in range(n_blocks)]
    return [Entry(block, b"x" * n_bytes, Note(len(tokens), is_pinned=pinned)) for block in blocks]


def _held(ram: RamTier, entries: list[Entry]) -> list[int]:
    return [i for i, entry in enumerate(entries) if entry.block.key in ram]


def _put(ram: RamTier, entries: list[Entry]) -> list[Entry]:
    return [lost for entry in entries for lost in ram.put(entry)]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_under_any_use_bytes_add_up_and_no_block_is_left_without_those_before_it(seed: int) -> None:
    rng = random.Random(seed)
    elsewhere = set[Key]()
    ram = RamTier(rng.randint(0, 200), elsewhere.__contains__)
    documents = [_entries(d, rng.randint(1, 6), rng.randint(1, 30), pinned=rng.random() < 0.1) for d in range(6)]
    for _ in range(60):
        document = rng.choice(documents)
        n_put = rng.randint(0, len(document))
        for entry in document[:n_put]:
            if entry.block.parent == document[0].block.parent or entry.block.parent in ram:
                fresh = Entry(entry.block, entry.blob, entry.note)
                for lost in ram.put(fresh):
                    assert lost.block.key not in ram
            if rng.random() < 0.3:
                elsewhere.add(entry.block.key)
        ram.touch(entry.block.key for entry in reversed(rng.choice(documents)))
        if rng.random() < 0.1:
            ram.shrink(ram.used_bytes // 2)
        held = list(ram)
        assert ram.used_bytes == sum(len(entry.blob) for entry in held) <= ram.limit_bytes
        for document in documents:
            assert _held(ram, document) == list(range(len(_held(ram, document))))
        for entry in held:
            assert entry.block in ram.children(entry.block.parent)


def test_blocks_that_claim_to_follow_each_other_in_a_circle_hold_nothing_up() -> None:
    ram, (first, second) = RamTier(20), _entries(1, 2)
    ram.put(second)
    ram.put(Entry(replace(first.block, parent=second.block.key, start=8), first.blob, first.note))
    assert len(ram.by_worth()) == 2
    ram.shrink(0)
    assert len(ram) == 0


def test_the_least_recently_used_sequence_goes_first_from_its_end() -> None:
    ram = RamTier(60)
    one, two, three = _entries(1, 3), _entries(2, 3), _entries(3, 2)
    _put(ram, [*one, *two])
    ram.touch(entry.block.key for entry in reversed(one))
    assert [entry.block.key for entry in _put(ram, three)] == [two[2].block.key, two[1].block.key]
    assert (_held(ram, one), _held(ram, two), _held(ram, three)) == ([0, 1, 2], [0], [0, 1])


def test_what_lies_elsewhere_too_goes_before_what_would_be_lost() -> None:
    elsewhere = set[Key]()
    ram = RamTier(60, elsewhere.__contains__)
    one, two = _entries(1, 3), _entries(2, 3)
    _put(ram, [*one, *two])
    elsewhere.add(two[2].block.key)
    assert _put(ram, _entries(3, 1)) == [two[2]]
    assert _put(ram, _entries(4, 1)) == [one[2]]


def test_what_is_fleeting_goes_before_all_others_however_new_and_used() -> None:
    ram = RamTier(60)
    one, two, three = _entries(1, 3), _entries(2, 2), _entries(3, 2)
    for entry in (*two, *three):
        entry.note = Note(8, is_private=True, is_fleeting=True)
    _put(ram, [*one, *two, three[0]])
    ram.touch(entry.block.key for entry in reversed(two))
    assert [entry.block.key for entry in _put(ram, _entries(4, 3))] == [
        three[0].block.key,
        two[1].block.key,
        two[0].block.key,
    ]
    assert _held(ram, one) == [0, 1, 2]
    assert _put(ram, two) == two  # where all is taken by others it does not stay
    assert _held(ram, one) == [0, 1, 2]


def test_a_sequence_too_long_for_the_tier_keeps_its_beginning() -> None:
    ram = RamTier(45)
    entries = _entries(1, 9)
    _put(ram, entries)
    assert _held(ram, entries) == [0, 1, 2, 3]


def test_pinned_blocks_stay_while_anything_else_can_go_and_the_budget_holds_all_the_same() -> None:
    ram = RamTier(60)
    pinned = _entries(1, 4, pinned=True)
    _put(ram, pinned)
    _put(ram, _entries(2, 30))
    assert _held(ram, pinned) == [0, 1, 2, 3]
    _put(ram, _entries(3, 6, pinned=True))
    assert ram.used_bytes <= 60


def test_what_comes_before_a_pinned_block_is_not_taken_from_it() -> None:
    ram = RamTier(60)
    entries = _entries(1, 4)
    entries[3].note = Note(16, is_pinned=True)
    _put(ram, entries)
    _put(ram, _entries(2, 30))
    assert _held(ram, entries) == [0, 1, 2, 3]


def test_a_block_larger_than_the_tier_is_handed_back() -> None:
    ram = RamTier(5)
    (entry,) = _entries(1, 1)
    assert ram.put(entry) == [entry]
    assert len(ram) == 0
    assert ram.n_evicted == 1


def test_the_heap_of_ends_does_not_grow_with_use() -> None:
    ram = RamTier(1000)
    entries = _entries(1, 5)
    _put(ram, entries)
    for _ in range(2000):
        ram.touch(entry.block.key for entry in entries)
    assert len(ram._ends) < 200


def test_the_newest_come_first_when_there_is_time_for_some_only_and_none_before_its_beginning() -> None:
    ram = RamTier(1000)
    one, two = _entries(1, 3), _entries(2, 3)
    _put(ram, [*one, *two])
    assert [e.block.key for e in ram.by_worth()] == [e.block.key for e in (*two, *one)]
    ram.touch([one[2].block.key])
    assert [e.block.key for e in ram.by_worth()] == [e.block.key for e in (*one, *two)]
