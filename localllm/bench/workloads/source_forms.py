"""Forms and names for Python source. Braces that stay in the source are doubled."""

from __future__ import annotations

NOUNS = (
    *("order", "invoice", "shipment", "sensor", "reading", "ticket", "route", "booking", "parcel", "account", "job"),
    *("message", "track", "frame", "recipe", "voucher", "session", "segment", "probe", "batch", "layer", "node"),
    *("folder", "patch", "widget", "lesson", "sample", "tariff", "warehouse", "vehicle", "crate", "journal"),
)
VERBS = (
    *("select", "merge", "count", "group", "drop", "rank", "split", "load", "check", "collect", "filter", "summarise"),
    *("index", "trim", "pair", "schedule", "score", "refresh", "archive", "balance", "resolve", "measure", "assign"),
)
ATTRIBUTES = (
    *("weight", "price", "priority", "retries", "size", "score", "distance", "level", "width", "delay", "margin"),
    *("quantity", "rating", "depth", "duration", "capacity", "offset", "version", "temperature", "revision"),
)
ADJECTIVES = (
    *("pending", "recent", "stale", "heavy", "valid", "open", "broken", "late", "unique", "hidden", "active", "empty"),
    *("remote", "local", "partial", "expired", "trusted", "nested", "ordered", "spare"),
)
PARAMETERS = ("limit", "threshold", "window", "step", "floor", "margin", "depth", "attempts", "size", "budget")
TYPES = ("int", "float", "str", "bool", "list[int]", "str | None", "dict[str, float]")

HEAD = '''"""Keeps track of {noun}s and of each {adjective} {attribute} they have."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

{constants}
'''

RECORD = '''
@dataclass(frozen=True)
class {record}:
    """One {adjective} {noun}, as it is stored."""

    name: str
{fields}
'''

CLASS = "\nclass"  # how a form begins that defines one
FORMS = (
    '''
def {name}({nouns}: Iterable[Any], {parameter}: int = {default}) -> list[Any]:
    """{docstring}"""
    found = []
    for {noun} in {nouns}:
        if {noun}.{attribute} < {parameter}:
            continue
        found.append({noun})
        if len(found) == {large}:
            break
    return sorted(found, key=lambda {noun}: {noun}.{second})
''',
    '''
def {name}({nouns}: dict[str, Any], {parameter}: int = {default}) -> dict[str, float]:
    """{docstring}"""
    total = sum({noun}.{attribute} for {noun} in {nouns}.values())
    if total <= {parameter}:
        return {{}}
    return {{key: round({noun}.{attribute} / total, {small}) for key, {noun} in {nouns}.items()}}
''',
    '''
def {name}(text: str, {parameter}: int = {default}) -> tuple[str, int]:
    """{docstring}"""
    head, separator, rest = text.partition(":")
    if not separator:
        raise ValueError(f"no {attribute} in {{text!r}}")
    {attribute} = int(rest.strip() or {parameter})
    return head.strip().lower(), max({attribute}, {small})
''',
    '''
def {name}(root: Any, {parameter}: int = {default}) -> Iterator[Any]:
    """{docstring}"""
    waiting = [(root, 0)]
    while waiting:
        {noun}, level = waiting.pop()
        yield {noun}
        if level < {parameter}:
            waiting.extend((below, level + 1) for below in {noun}.parts)
''',
    '''
def {name}({nouns}: list[Any], {parameter}: int = {default}) -> dict[str, list[Any]]:
    """{docstring}"""
    groups: dict[str, list[Any]] = defaultdict(list)
    for at, {noun} in enumerate({nouns}):
        key = "{adjective}" if {noun}.{attribute} % {small} == 0 else {noun}.name
        if at >= {parameter} and key not in groups:
            break
        groups[key].append({noun})
    return dict(groups)
''',
    '''
def {name}(first: list[float], second: list[float], {parameter}: int = {default}) -> float:
    """{docstring}"""
    if len(first) != len(second):
        raise ValueError("{nouns} and {other}s differ in number")
    squares = sum((a - b) ** 2 for a, b in zip(first, second))
    {attribute} = math.sqrt(squares / max(1, len(first)))
    return min({attribute}, float({parameter}))
''',
    '''
class {name}:
    """{docstring}"""

    def __init__(self, {parameter}: int = {default}) -> None:
        self.{parameter} = {parameter}
        self._{nouns}: dict[str, Any] = {{}}

    def add(self, {noun}: Any) -> bool:
        if len(self._{nouns}) >= self.{parameter}:
            return False
        self._{nouns}[{noun}.name] = {noun}
        return True

    def {attribute}(self) -> float:
        return sum({noun}.{second} for {noun} in self._{nouns}.values()) / {small}
''',
    '''
def {name}({other}: Any, {parameter}: int = {default}) -> list[str]:
    """{docstring}"""
    lines = [f"{{{other}.name}}: {{{other}.{attribute}}}"]
    for number in range(1, {parameter}):
        {noun} = {other}.find(number * {small})
        if {noun} is None:
            lines.append(f"{{number:>{small}}} {adjective}")
        elif {noun}.{second} > {large}:
            lines.append(f"{{number:>{small}}} {{{noun}.name}} (above {large})")
    return lines
''',
    '''
def {name}({nouns}: list[Any], {parameter}: int = {default}) -> Any | None:
    """{docstring}"""
    best, best_{attribute} = None, -math.inf
    for {noun} in {nouns}[-{parameter}:]:
        gained = {noun}.{attribute} - {small} * {noun}.{second}
        if gained > best_{attribute}:
            best, best_{attribute} = {noun}, gained
    return best
''',
    '''
def {name}(read: Any, {parameter}: int = {default}) -> bytes:
    """{docstring}"""
    for attempt in range({parameter}):
        try:
            data = read(timeout_s=attempt + {small})
        except TimeoutError:
            continue
        if data.startswith(b"{noun}"):
            return data[len(b"{noun}"):]
    raise LookupError("no {adjective} {noun} after all attempts")
''',
    '''
def {name}({nouns}: list[Any], {parameter}: int = {default}) -> list[list[Any]]:
    """{docstring}"""
    rows, row, used = [], [], 0
    for {noun} in {nouns}:
        if used + {noun}.{attribute} > {parameter} and row:
            rows.append(row)
            row, used = [], 0
        row.append({noun})
        used += {noun}.{attribute}
    return [*rows, row] if row else rows
''',
    '''
def {name}(old: dict[str, int], new: dict[str, int], {parameter}: int = {default}) -> dict[str, int]:
    """{docstring}"""
    changed = {{}}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, 0), new.get(key, 0)
        if abs(after - before) >= {parameter} or key.startswith("{noun}"):
            changed[key] = after - before
    return changed
''',
)
