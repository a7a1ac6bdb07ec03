"""Stop strings: the earliest match wins, nothing of it shows, nothing else is lost (B03)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import UsageError
from localllm.runtime.stop import MAX_STOPS, StopMatcher, check_stops


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    """Push the parts until a match, as the scheduler does, then flush; what was emitted and the match."""
    matcher = StopMatcher(stops)
    emitted: list[str] = []
    for part in parts:
        text, matched = matcher.push(part)
        emitted.append(text)
        if matched:
            break
    else:
        emitted.append(matcher.flush())
    return emitted, matcher.matched


def plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, plainly: the match that begins first, of those the shorter."""
    found = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[2])


CASES = [
    (["abc"], ["ab"], ["", "ab"], None),  # held, then given back at the end
    (["abc"], ["ab", "", "c"], ["", "", ""], "abc"),
    (["END"], ["x END y"], ["x "], "END"),  # inside one token
    (["bc", "abcd"], ["abcd"], [""], "abcd"),
    (["bc", "abcd"], ["a", "b", "c", "d"], ["", "", "", ""], "abcd"),
    (["bc", "abcd"], ["a", "b", "c", "x"], ["", "", "", "a"], "bc"),
    (["bc", "abcd"], ["a", "bc"], ["", "", "a"], "bc"),  # decided by the end
    (["ab", "abc"], ["xa", "bc"], ["x", ""], "ab"),
    (["aab"], ["aa", "a", "b"], ["", "a", ""], "aab"),
    (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
    (["🦊!"], ["a🦊", "?"], ["a", "🦊?", ""], None),
    ([], ["anything"], ["anything", ""], None),
    (["z"], ["anything", ""], ["anything", "", ""], None),
]


@pytest.mark.parametrize(("stops", "parts", "emitted", "matched"), CASES, ids=repr)
def test_cases(stops: list[str], parts: list[str], emitted: list[str], matched: str | None) -> None:
    assert run(stops, parts) == (emitted, matched)


def test_nothing_is_emitted_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("more") == ("", "b")
    assert matcher.flush() == ""


def test_only_a_possible_beginning_of_a_stop_is_held() -> None:
    matcher = StopMatcher(["</tool>", "User:"])
    assert matcher.push("a < b </to") == ("a < b ", None)
    assert matcher.push("ad> Use") == ("</toad> ", None)
    assert matcher.push("d") == ("Used", None)


STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(stops=STOPS, text=st.text("abcd", max_size=30), cuts=st.lists(st.integers(0, 30), max_size=10))
@settings(max_examples=400, deadline=None)
def test_every_split_gives_what_the_whole_text_gives(stops: list[str], text: str, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    emitted, matched = run(stops, parts)
    assert ("".join(emitted), matched) == plain(stops, text)


@given(stops=STOPS, text=st.text("abcd", max_size=30))
@settings(max_examples=150, deadline=None)
def test_what_is_held_is_never_longer_than_needed(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    n_emitted = 0
    for i, char in enumerate(text):
        emitted, matched = matcher.push(char)
        n_emitted += len(emitted)
        if matched:
            return
        seen = text[: i + 1]
        held = seen[n_emitted:]
        assert not held or any(stop.startswith(held[: len(stop)]) for stop in stops)


def test_a_long_stop_that_almost_matches_all_the_time_costs_linear_time() -> None:
    """80 000 characters with 50 000 held: milliseconds, where searching the held text again takes minutes."""
    matcher = StopMatcher(["a" * 50_000 + "b"])
    start = time.perf_counter()
    n_emitted = sum(len(matcher.push("aaaa")[0]) for _ in range(20_000))
    assert n_emitted == 30_000
    assert matcher.push("ab")[1] is not None
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("stops", "says"),
    [
        ([""], "empty"),
        (["a", ""], "empty"),
        (["a"] * 17, "17 stop texts, at most 16"),
        ("abc", "list of texts"),
        ([1], "list of texts"),
        (None, "list of texts"),
    ],
)
def test_wrong_stops_are_refused(stops: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_stops(stops)


def test_sixteen_stops_are_fine() -> None:
    stops = [f"s{i}" for i in range(MAX_STOPS)]
    assert check_stops(stops) == tuple(stops)
    assert run(stops, ["abc s15"]) == (["abc "], "s1")
