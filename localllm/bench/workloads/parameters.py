"""Parameters of a workload, as text and as a frozen dataclass: `documents=2,document=600`."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")

_DECIMALS = re.compile(r"\d{0,4}(\.\d{0,3})?")
_RULE = "rule"
MOST_WORDS = 200_000
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Rule:
    """What values a parameter takes: whole numbers, decimals or `words`, and what it does."""

    effect: str
    least: float = 0
    most: float = 0
    unit: str = ""
    words: tuple[str, ...] = ()
    is_whole: bool = True

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.words:
            return " or ".join(self.words)
        kind = "a whole number" if self.is_whole else "a number of at most three decimals"
        of = f" of {self.unit}" if self.unit else ""
        return f"{kind}{of} from {self.least:g} to {self.most:.0f}"

    def value(self, text: str) -> int | float | str | None:
        """Return the value that `text` spells; None where it spells none that is allowed."""
        if self.words:
            return text if text in self.words else None
        if not (text.isascii() and (text.isdigit() if self.is_whole else _DECIMALS.fullmatch(text))):
            return None
        try:
            number = int(text) if self.is_whole else float(text)
        except ValueError:
            return None
        return number if self.least <= number <= self.most else None


def count(default: int, least: int, most: int, effect: str) -> Any:
    """Return a field of a number of things."""
    return dataclasses.field(default=default, metadata={_RULE: Rule(effect, least, most)})


def words(default: int, effect: str, *, least: int = 1) -> Any:
    """Return a field of a length in words: the median of those drawn."""
    return dataclasses.field(default=default, metadata={_RULE: Rule(effect, least, MOST_WORDS, "words")})


def tokens(default: int, effect: str) -> Any:
    """Return a field of an answer's length in tokens."""
    return dataclasses.field(default=default, metadata={_RULE: Rule(effect, 1, 100_000, "tokens")})


def choice(default: str, others: tuple[str, ...], effect: str) -> Any:
    """Return a field that is one of a few words."""
    return dataclasses.field(default=default, metadata={_RULE: Rule(effect, words=(default, *others))})


def spread(default: float) -> Any:
    """Return the field that says how far lengths vary: the sigma of their logarithm; 0 makes all the same."""
    effect = "how far lengths vary around their median (sigma of a log-normal; 0: not at all)"
    return dataclasses.field(default=default, metadata={_RULE: Rule(effect, 0, 2, is_whole=False)})


def rules(kind: type[DataclassInstance]) -> Iterator[tuple[str, Any, Rule]]:
    """Yield each parameter's name, default and rule."""
    for field in dataclasses.fields(kind):
        yield field.name, field.default, field.metadata[_RULE]


def parse_pairs(workload: str, text: str) -> dict[str, str]:
    """Return `key=value,key=value` as it is written. Raises UsageError naming the workload and the piece."""
    found: dict[str, str] = {}
    for piece in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or not key or not value:
            raise UsageError(
                f"The workload {workload} takes key=value pairs; {piece.strip()!r} is none.",
                f"localllm bench serve --help shows the workloads; {workload}:key=value,key=value",
            )
        if key in found:
            raise UsageError(f"The workload {workload} is given {key} twice.", f"keep one {key}=...")
        found[key] = value
    return found


def parse_parameters(workload: str, kind: type[P], text: str) -> P:
    """Return the parameters that `text` spells, defaults for the others. Raises UsageError."""
    known = {name: (default, rule) for name, default, rule in rules(kind)}
    values: dict[str, Any] = {}
    for key, spelled in parse_pairs(workload, text).items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            meant = f"{workload}:{close[0]}={known[close[0]][0]}" if close else workload
            raise UsageError(
                f"The workload {workload} has no parameter {key!r}; it has {', '.join(known)}.", f"--workload {meant}"
            )
        default, rule = known[key]
        values[key] = rule.value(spelled)
        if values[key] is None:
            raise UsageError(
                f"The workload {workload} takes for {key} {rule.allowed}, not {spelled[:_SHOWN_CHARS]!r}.",
                f"--workload {workload}:{key}={default}",
            )
    return kind(**values)


def canonical(parameters: DataclassInstance) -> str:
    """Return what `parse_parameters` needs to give the same again: sorted, without those at their default."""
    changed = {
        name: getattr(parameters, name)
        for name, default, _ in rules(type(parameters))
        if getattr(parameters, name) != default
    }
    return ",".join(f"{name}={_spelled(changed[name])}" for name in sorted(changed))


def _spelled(value: int | float | str) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def described(kind: type[DataclassInstance]) -> Iterator[str]:
    """Yield a line of help for each parameter."""
    for name, default, rule in rules(kind):
        yield f"  {name}={default}: {rule.effect} ({rule.allowed})"
