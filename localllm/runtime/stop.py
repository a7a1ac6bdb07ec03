"""Stop strings: find the first one in text that comes in pieces, and never let it through."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from localllm.errors import UsageError

MAX_STOPS = 16


def check_stops(stops: Any) -> tuple[str, ...]:
    """Return `stops` as a tuple.

    Raises: UsageError for more than 16, an empty one, or anything but a list of texts.
    """
    if isinstance(stops, str) or not isinstance(stops, Sequence) or not all(isinstance(s, str) for s in stops):
        raise UsageError("stop must be a list of texts", 'give stop as ["text"]', field="stop")
    if len(stops) > MAX_STOPS:
        raise UsageError(f"{len(stops)} stop texts, at most {MAX_STOPS}", "give fewer stop texts", field="stop")
    if "" in stops:
        raise UsageError("a stop text is empty", "leave the empty stop text out", field="stop")
    if any("\ud800" <= character <= "\udfff" for stop in stops for character in stop):
        raise UsageError("a stop text is not valid Unicode: no answer can hold it", "leave it out", field="stop")
    return tuple(stops)


class StopMatcher:
    """Cuts the answer before the earliest stop string, however the text is split into pushes.

    Earliest = the match that begins first; of two that begin together, the shorter. While a
    longer one that began before could still complete, the decision waits for more text.
    What could be the beginning of a stop string is held back, nothing else. `matched` is the
    stop string found, or None; after a match nothing more is emitted.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._machines = [_Machine(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._parts: deque[str] = deque()  # the held text: these joined, less `_n_skipped` of the first
        self._n_skipped = 0
        self._n_held = 0
        self._found: tuple[int, str] | None = None  # where in the held text the best match begins, and which
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show, and the stop string once one is found.

        Cost: linear in the text, however much is held.
        """
        if self.matched is not None:
            return "", self.matched
        if not text or (not self._n_held and self._first_chars.isdisjoint(text)):
            return text, None
        n_before = n_safe = self._n_held
        self._parts.append(text)
        self._n_held += len(text)
        for position, char in enumerate(text, n_before + 1):
            n_safe = self._step(char, position)
            if self._found is not None and n_safe >= self._found[0]:
                return self._cut(), self.matched
        if self._found is not None:
            self._found = (self._found[0] - n_safe, self._found[1])
        return self._take(n_safe), None

    def flush(self) -> str:
        """End the text: return what was held, cut before a match that waited (then `matched` is set)."""
        if self._found is not None:
            return self._cut()
        for machine in self._machines:
            machine.n_matched = 0
        return self._take(self._n_held)

    def _step(self, char: str, position: int) -> int:
        """Feed the character before `position`; return how much of the held text can begin no match."""
        n_safe = position
        for machine in self._machines:
            if machine.step(char):
                begin = position - len(machine.stop)
                if self._found is None or begin < self._found[0]:
                    self._found = (begin, machine.stop)
            n_safe = min(n_safe, position - machine.n_matched)
        return n_safe

    def _cut(self) -> str:
        """Settle on the match that was found; return the text before it and drop the rest."""
        assert self._found is not None
        begin, self.matched = self._found
        text = self._take(begin)
        self._parts.clear()
        self._n_held, self._found = 0, None
        return text

    def _take(self, n_chars: int) -> str:
        """Remove and return the first `n_chars` of the held text."""
        self._n_held -= n_chars
        taken: list[str] = []
        while n_chars > 0:
            taken.append(self._parts[0][self._n_skipped : self._n_skipped + n_chars])
            n_chars -= len(taken[-1])
            self._n_skipped += len(taken[-1])
            if self._n_skipped == len(self._parts[0]):
                self._parts.popleft()
                self._n_skipped = 0
        return "".join(taken)


class _Machine:
    """One stop string's Knuth-Morris-Pratt automaton; `n_matched` characters of it are matched now."""

    __slots__ = ("_fallback", "n_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_matched = 0
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def step(self, char: str) -> bool:
        """Take one character; True if it completes the stop string (overlapping matches go on)."""
        n = self.n_matched
        while n and self.stop[n] != char:
            n = self._fallback[n - 1]
        n += self.stop[n] == char
        complete = n == len(self.stop)
        self.n_matched = self._fallback[n - 1] if complete else n
        return complete
