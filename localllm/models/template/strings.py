"""The string operations a template has: Python's, bounded, and keeping each character's origin."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

from localllm.models.template.meter import Meter, OverBudget
from localllm.models.template.text import Text, concat, cost, cut, whole

PART_CHARS = 64  # what a short string of its own is counted as: the room that its object takes
_MAX_WIDTH = 4_096
_PERCENT = re.compile(r"%(?:\((?P<key>[^)]*)\))?(?P<flags>[#0\- +]*[0-9*]*(?:\.[0-9*]*)?)[hlL]?(?P<kind>.)", re.DOTALL)


def add(meter: Meter, pieces: tuple[str, ...]) -> str:
    """Concatenate."""
    meter.charge(sum(map(cost, pieces)))
    return concat(pieces)


def repeat(meter: Meter, text: str, n_times: int) -> str:
    """Return `text` n_times over."""
    meter.charge(cost(text) * max(0, n_times))
    return concat((text,) * n_times) if len(text) * n_times < 65_536 else whole(str.__mul__(text, n_times), text)


def join(meter: Meter, separator: str, items: Iterable[Any]) -> str:
    """Python's str.join, for any finite iterable of strings."""
    pieces: list[str] = []
    n_chars = 0
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"sequence item {len(pieces)}: expected str instance, {type(item).__name__} found")
        meter.tick()
        pieces.append(item)
        n_chars += cost(item) + cost(separator)
    meter.charge(n_chars)
    if separator and pieces:
        pieces = [piece for item in pieces for piece in (separator, item)][1:]
    return concat(pieces)


def replace(meter: Meter, text: str, old: str, new: str, count: int = -1) -> str:
    """Python's str.replace."""
    n_found = str.count(text, old)
    meter.charge(cost(text) + (n_found if count < 0 else min(n_found, count)) * cost(new))
    meter.tick(n_found)
    if not isinstance(text, Text) and not isinstance(new, Text):
        return str.replace(text, old, new, count)
    if not old or not n_found or count == 0:
        return text if old or count == 0 else whole(str.replace(text, old, new, count), text, new)
    pieces: list[str] = []
    at, n_left = 0, n_found if count < 0 else count
    while n_left and (found := str.find(text, old, at)) >= 0:
        pieces += (cut(text, at, found), new)
        at, n_left = found + len(old), n_left - 1
    return concat([*pieces, cut(text, at, len(text))])


def strip(meter: Meter, text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> str:
    """Python's str.strip, lstrip and rstrip."""
    meter.charge(cost(text))
    end = len(str.rstrip(text, chars)) if right else len(text)
    start = len(text) - len(str.lstrip(text, chars)) if left else 0
    return cut(text, min(start, end), end)


def split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1, *, right: bool = False) -> list[str]:
    """Python's str.split and rsplit."""
    n_parts = str.count(text, sep) if sep else len(text) // 2
    meter.charge(cost(text) + PART_CHARS * (n_parts if maxsplit < 0 else min(n_parts, maxsplit)))
    parts = str.rsplit(text, sep, maxsplit) if right else str.split(text, sep, maxsplit)
    return _located(meter, text, parts, sep or "")


def splitlines(meter: Meter, text: str, keepends: bool = False) -> list[str]:
    """Python's str.splitlines."""
    meter.charge(cost(text) + PART_CHARS * (str.count(text, "\n") + str.count(text, "\r")))
    return _located(meter, text, str.splitlines(text, keepends), "")


def _located(meter: Meter, text: str, parts: list[str], separator: str) -> list[str]:
    """Give parts that follow each other in `text` their origins back."""
    meter.tick(len(parts))
    if not isinstance(text, Text):
        return parts
    located, at = [], 0
    for part in parts:
        start = at if separator else str.find(text, part, at)
        at = start + len(part)
        located.append(cut(text, start, at))
        at += len(separator)
    return located


def partition(meter: Meter, text: str, separator: str, *, right: bool = False) -> tuple[str, str, str]:
    """Python's str.partition and rpartition."""
    meter.charge(cost(text))
    before, found, _ = str.rpartition(text, separator) if right else str.partition(text, separator)
    middle = len(before) + len(found)
    return cut(text, 0, len(before)), cut(text, len(before), middle), cut(text, middle, len(text))


def pad(meter: Meter, text: str, width: int, fill: str = " ", *, how: str) -> str:
    """Python's center, ljust, rjust and zfill."""
    meter.charge(max(cost(text), width))
    padded = str.zfill(text, width) if how == "zfill" else getattr(str, how)(text, width, fill)
    return whole(padded, text, fill)


def trim_affix(meter: Meter, text: str, affix: str, *, left: bool) -> str:
    """Python's removeprefix and removesuffix."""
    meter.charge(cost(text))
    if left:
        return cut(text, len(affix), len(text)) if str.startswith(text, affix) else text
    return cut(text, 0, len(text) - len(affix)) if affix and str.endswith(text, affix) else text


def recase(meter: Meter, text: str, *, how: str) -> str:
    """Python's upper, lower, title, capitalize, swapcase and casefold."""
    meter.charge(3 * cost(text))
    changed: str = getattr(str, how)(text)
    if isinstance(text, Text) and len(changed) == len(text):
        return Text(changed, text.spans)
    return whole(changed, text)


def percent(meter: Meter, template: str, values: Any) -> str:
    """Python's `%` formatting, without a width taken from an argument."""
    sequence = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for spec in _PERCENT.finditer(template):
        pieces.append(cut(template, at, spec.start()))
        at = spec.end()
        if spec["kind"] == "%" and spec["key"] is None:
            pieces.append("%")
            continue
        _check_width(spec["flags"])
        if spec["key"] is None:
            try:
                value = next(sequence)
            except StopIteration:
                raise TypeError("not enough arguments for format string") from None
        else:
            value = values[spec["key"]]
        if isinstance(value, str) and spec["kind"] == "s" and not spec["flags"]:
            pieces.append(value)
        else:
            meter.weigh(value)
            pieces.append(whole(f"%{spec['flags']}{spec['kind']}" % (value,), value))
        meter.charge(len(pieces[-1]))
    if isinstance(values, tuple) and next(sequence, None) is not None:
        raise TypeError("not all arguments converted during string formatting")
    return add(meter, (*pieces, cut(template, at, len(template))))


def format_text(
    meter: Meter,
    template: str,
    get_field: Callable[[str, tuple[Any, ...], Mapping[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    counter: Iterator[int] | None = None,
) -> str:
    """Python's str.format; `get_field` looks up names inside the sandbox."""
    automatic = counter or itertools.count()
    pieces: list[str] = []
    for literal, name, spec, conversion in Formatter().parse(template):
        meter.tick()
        pieces.append(whole(literal, template))
        if name is None:
            continue
        if name == "" or name[0] in ".[":
            name = f"{next(automatic)}{name}"
        value = get_field(name, args, kwargs)
        spec = str(format_text(meter, spec, get_field, args, kwargs, automatic)) if spec else ""
        _check_width(spec)
        if not isinstance(value, str) or conversion or spec:
            meter.weigh(value)
            converted = Formatter().convert_field(value, conversion)
            value = whole(format(converted, spec), value)
        meter.charge(len(value))
        pieces.append(value)
    return add(meter, tuple(pieces))


def _check_width(spec: str) -> None:
    """Refuse field widths that make text out of nothing."""
    if "*" in spec or any(int(digits) > _MAX_WIDTH for digits in re.findall(r"[0-9]{1,20}", spec)):
        raise OverBudget(f"it formats a field wider than {_MAX_WIDTH} characters")


def _search(name: str) -> Callable[..., Any]:
    """Return Python's method of this name, counted: it reads the text and returns no text."""
    method = getattr(str, name)

    def search(meter: Meter, text: str, *args: Any) -> Any:
        meter.weigh(text)
        return method(text, *args)

    return search


_SEARCHES = [
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
]


def _keywords(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    def call(meter: Meter, text: str, *args: Any, **kwargs: Any) -> Any:
        return function(meter, text, *args, **kwargs, **fixed)

    return call


METHODS: Mapping[str, Callable[..., Any]] = {
    **{name: _search(name) for name in _SEARCHES},
    **{name: _keywords(recase, how=name) for name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold")},
    **{name: _keywords(pad, how=name) for name in ("center", "ljust", "rjust", "zfill")},
    "strip": strip,
    "lstrip": _keywords(strip, right=False),
    "rstrip": _keywords(strip, left=False),
    "split": split,
    "rsplit": _keywords(split, right=True),
    "splitlines": splitlines,
    "partition": partition,
    "rpartition": _keywords(partition, right=True),
    "replace": replace,
    "join": join,
    "removeprefix": _keywords(trim_affix, left=True),
    "removesuffix": _keywords(trim_affix, left=False),
}
"""What `text.name(...)` reaches in a template, besides format and format_map; called (meter, text, ...)."""


def split_field(name: str) -> tuple[int | str, list[tuple[bool, int | str]]]:
    """Split a format field such as `0.name[key]` into its first part and (is attribute, key) steps."""
    first, *rest = re.split(r"(?=[.\[])", name)
    steps: list[tuple[bool, int | str]] = []
    for step in rest:
        key = step[1:] if step[0] == "." else step[1:].removesuffix("]")
        steps.append((step[0] == ".", int(key) if step[0] == "[" and key.isdecimal() else key))
    return int(first) if first.isdecimal() else first, steps
