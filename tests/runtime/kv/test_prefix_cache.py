"""The radix tree finds what a scan over all paths would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.kv.prefix_cache import PrefixCache, PrefixHit
from localllm.runtime.slots import common_prefix

PATH = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 4), PATH), max_size=30), wanted=PATH)
@settings(max_examples=300, deadline=None)
def test_match_equals_a_scan_of_every_path(steps: list[tuple[bool, int, list[int]]], wanted: list[int]) -> None:
    cache, paths = PrefixCache(), dict[int, list[int]]()
    for insert, slot, path in steps:
        if insert:
            cache.insert("root", slot, path)
            paths[slot] = path
        else:
            cache.remove(slot)
            paths.pop(slot, None)
    found = cache.match("root", wanted)
    scan = {slot: common_prefix(path, wanted) for slot, path in paths.items()}
    assert {hit.slot: hit.n_common for hit in found} == {slot: n for slot, n in scan.items() if n}
    assert [hit.n_common for hit in found] == sorted((hit.n_common for hit in found), reverse=True)


def test_roots_are_apart() -> None:
    cache = PrefixCache()
    cache.insert(("adapter", ""), 1, [1, 2, 3])
    assert cache.match(("", ""), [1, 2, 3]) == []
    assert cache.match(("adapter", ""), [1, 2, 3]) == [PrefixHit(1, 3)]


def test_removing_every_slot_leaves_nothing_behind() -> None:
    cache = PrefixCache()
    for slot, path in enumerate(([1, 2, 3], [1, 2, 4], [1], [5])):
        cache.insert("root", slot, path)
    for slot in range(4):
        cache.remove(slot)
    assert not cache._roots


def test_a_root_goes_with_its_last_slot_also_where_one_has_no_tokens() -> None:
    cache = PrefixCache()
    for n in range(100):  # each connection has a root of its own
        cache.insert(("", f"salt {n}"), n % 4, [1, 2, n] if n % 5 else [])
    assert len(cache._roots) <= 4
    cache.insert("root", 0, [])
    cache.insert("root", 1, [])
    cache.remove(0)
    cache.insert("root", 2, [7])
    cache.remove(1)
    assert cache.match("root", [7]) == [PrefixHit(2, 1)]
