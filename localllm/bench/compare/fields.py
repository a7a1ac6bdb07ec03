"""Reads values out of files that others wrote: each of the type it must have, or a sentence that says where not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 1e15
"""No number of a benchmark is beyond this; what is would only spoil the arithmetic."""

SMALLEST = 1e-15
"""What is nearer to nothing is nothing, for the same reason."""


class Malformed(Exception):
    """`place` of the file ("runs[0].ttfts[3]") and what is wrong there."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(place, what)
        self.place, self.what = place, what


class Fields:
    """An object of a file, and its place there. A field that is missing and one that is null are the same."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, Mapping):
            raise Malformed(place, f"{kind_of(value)} where an object should be")
        self._value, self._place = value, place

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    @property
    def plain(self) -> Mapping[str, Any]:
        """The object as it was read."""
        return self._value

    def at(self, name: str) -> str:
        """Return the place of a field."""
        return f"{self._place}.{name}" if self._place else name

    def number(self, name: str) -> float | None:
        """Return a number. Raises Malformed."""
        value = self._value.get(name)
        return None if value is None else number(value, self.at(name))

    def text(self, name: str) -> str:
        """Return a text, "" for none. Raises Malformed."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise Malformed(self.at(name), f"{kind_of(value)} where a text should be")
        return value or ""

    def flag(self, name: str) -> bool:
        """Return true or false, false for none. Raises Malformed."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, bool):
            raise Malformed(self.at(name), f"{kind_of(value)} where true or false should be")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        """Return a list, [] for none. Raises Malformed."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, list):
            raise Malformed(self.at(name), f"{kind_of(value)} where a list should be")
        return value or []

    def texts(self, name: str) -> list[str]:
        """Return a list of texts. Raises Malformed."""
        for index, value in enumerate(self.items(name)):
            if not isinstance(value, str):
                raise Malformed(f"{self.at(name)}[{index}]", f"{kind_of(value)} where a text should be")
        return self.items(name)

    def numbers(self, name: str) -> list[float | None]:
        """Return a list of numbers, None where one is null. Raises Malformed."""
        return optional_numbers(self.items(name), self.at(name))

    def inner(self, name: str) -> Fields | None:
        """Return an object. Raises Malformed."""
        value = self._value.get(name)
        return None if value is None else Fields(value, self.at(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list. Raises Malformed."""
        for index, value in enumerate(self.items(name)):
            yield Fields(value, f"{self.at(name)}[{index}]")


def number(value: Any, place: str) -> float:
    """Return a number of at most LARGEST. Raises Malformed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Malformed(place, f"{kind_of(value)} where a number should be")
    if not abs(value) <= LARGEST:  # nan neither
        raise Malformed(place, "a number beyond all measure")
    return float(value) if abs(value) >= SMALLEST else 0.0


def optional_numbers(values: list[Any], place: str) -> list[float | None]:
    """Return the numbers of a list, None where one is null. Raises Malformed."""
    return [None if value is None else number(value, f"{place}[{index}]") for index, value in enumerate(values)]


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
