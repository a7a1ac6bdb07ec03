"""`mixed`: sessions of several workloads in turn, so that each has its share of all requests."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from localllm.bench.workloads.ask import Session, Workload
from localllm.bench.workloads.parameters import parse_pairs
from localllm.bench.workloads.recipe import Recipe
from localllm.errors import UsageError

_WEIGHT = re.compile(r"(?=.*[1-9])\d{0,6}(\.\d{0,3})?")  # so that the spec can spell every ratio again
_EXAMPLE = "--workload mixed:chat=.6,rag=.3,story=.1"
_THOUSAND = 1_000
_MOST_WHOLE = 999_999


@dataclass(frozen=True, slots=True)
class Part:
    """A workload of a mix and its share of all requests."""

    name: str
    workload: Workload
    share: Fraction


@dataclass(frozen=True, slots=True)
class Mixed:
    """Several workloads in turn. `parts` stand sorted by name; their shares are 1 together."""

    parts: tuple[Part, ...]
    is_trace: bool = False

    @property
    def spec(self) -> str:
        """Its canonical text: shares as decimals where those are short, else as whole numbers in proportion."""
        in_thousandths = [part.share * _THOUSAND for part in self.parts]
        common = math.lcm(*(part.share.denominator for part in self.parts))
        whole = [part.share * common for part in self.parts]
        if all(share.denominator == 1 for share in in_thousandths):
            weights = [_decimal(share.numerator) for share in in_thousandths]
        elif max(whole) <= _MOST_WHOLE:
            weights = [str(weight) for weight in whole]
        else:
            weights = [_decimal(weight.numerator) for weight in whole]
        return "mixed:" + ",".join(f"{part.name}={weight}" for part, weight in zip(self.parts, weights, strict=True))

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of each part, and the shares."""
        return {
            "effect": "several workloads in turn",
            "parts": {
                part.name: {"share_of_requests": round(float(part.share), 4), **part.workload.facts}
                for part in self.parts
            },
        }

    def sessions(self, seed: int) -> Iterator[Session]:
        """Yield sessions without end: always of the part that is furthest behind its share of the requests."""
        waiting = [part.workload.sessions(seed) for part in self.parts]
        following = [next(sessions) for sessions in waiting]
        n_asked = [0] * len(self.parts)
        while True:
            # A session counts to its middle (Sainte-Laguë), so that the first are not all of the largest part.
            at = min(
                range(len(self.parts)),
                key=lambda at: Fraction(2 * n_asked[at] + len(following[at])) / self.parts[at].share,
            )
            yield following[at]
            n_asked[at] += len(following[at])
            following[at] = next(waiting[at])


def _decimal(n_thousandths: int) -> str:
    """Return a number of thousandths as a decimal, without zeros at its end."""
    whole, rest = divmod(n_thousandths, _THOUSAND)
    return f"{whole}.{rest:03}".rstrip("0").rstrip(".")


def mixed(text: str, recipe: Callable[[str], Recipe[Any]]) -> Mixed:
    """Return the mix that `text` spells ("chat=.6,rag=.3"); weights are normalised. Raises UsageError."""
    weights: dict[str, Fraction] = {}
    for name, spelled in parse_pairs("mixed", text).items():
        if name in ("mixed", "replay"):
            raise UsageError(f"The workload mixed has no part {name}: it mixes the shipped ones.", _EXAMPLE)
        if not spelled.isascii() or not _WEIGHT.fullmatch(spelled):
            raise UsageError(
                f"The workload mixed takes for {name} a weight from 0.001 to 999999, not {spelled[:40]!r}.", _EXAMPLE
            )
        weights[name] = Fraction(spelled)
    if not weights:
        raise UsageError("The workload mixed needs its parts with their weights.", _EXAMPLE)
    total = sum(weights.values())
    parts = (Part(name, recipe(name).workload(""), weights[name] / total) for name in sorted(weights))
    return Mixed(tuple(parts))
