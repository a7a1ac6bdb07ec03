"""Judges the rules of a contract on what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from localllm.bench.contract.measured import Measured, Standing, middle
from localllm.bench.contract.terms import Key, Rule
from localllm.bench.stats.summaries import median

Forbids: TypeAlias = Callable[[str, str], str]
"""Says why two candidates cannot be compared; "" where they can."""


class Judge:
    """Knows what was measured. `forbids`: between two candidates, by name."""

    def __init__(self, standings: Mapping[str, Standing], measured: Measured, forbids: Forbids) -> None:
        self._standings = standings
        self._measured = measured
        self._forbids = forbids

    def verdict(self, rule: Rule) -> dict[str, Any]:
        """Return a rule with the value found, the worst of its cells; without one at each it is not kept.

        `why`: what was missing or, where it does not hold at one of several cells, at which.
        """
        found = [(key, *self._value(rule, key)) for key in rule.cells or (None,)]
        missing = next(((key, why) for key, value, why in found if value is None), None)
        value, why = None, ""
        if missing is not None:
            why = missing[1]
        else:
            key, value = _worst([(key, value) for key, value, _ in found if value is not None], rule)
            if key is not None and len(found) > 1 and not rule.holds(value):
                why = f"the worst is at {', '.join(key)}"
        return {
            "rule": rule.number,
            "text": rule.text,
            "measure": rule.measure.name,
            "passed": value is not None and rule.holds(value),
            "value": value,
            "bound": rule.bound,
            "is_ratio": bool(rule.over),
            "why": why,
        }

    def _value(self, rule: Rule, key: Key | None) -> tuple[float | None, str]:
        """Return the median over rounds (of the ratio in each round, where it is one), or why there is none."""
        values = self._values(rule, rule.candidate, key)
        if not values:
            return None, self._missing(rule, rule.candidate, key)
        if not rule.over:
            return middle(values), ""
        why = self._forbids(rule.candidate, rule.over)
        if why:
            return None, why
        others = self._values(rule, rule.over, key)
        if not others:
            return None, self._missing(rule, rule.over, key)
        pairs = [(values[r], others[r]) for r in sorted(values.keys() & others.keys())]
        if not pairs:
            return None, f"no round has both {rule.candidate} and {rule.over}"
        if any(other <= 0 for _, other in pairs):
            return None, f"{rule.measure.name} of {rule.over} was 0, which nothing can be put over"
        return median([value / other for value, other in pairs]), ""

    def _values(self, rule: Rule, name: str, key: Key | None) -> Mapping[int, float]:
        if key is None:
            return dict(enumerate(1e3 * seconds for seconds in self._standings[name].ready_s))
        return self._measured.values(name, key, rule.measure.name)

    def _missing(self, rule: Rule, name: str, key: Key | None) -> str:
        standing = self._standings[name]
        if standing.left_out:
            return f"{name} is {standing.left_out}"
        if key is None:
            return f"{name} was not started"
        return f"{name}, {', '.join(key)}: {_why(self._measured, standing, key, rule.measure.name)}"


def _worst(found: Sequence[tuple[Key | None, float]], rule: Rule) -> tuple[Key | None, float]:
    return max(found, key=lambda at: at[1]) if rule.is_upper else min(found, key=lambda at: at[1])


def _why(measured: Measured, standing: Standing, key: Key, name: str) -> str:
    unsupported = standing.unsupported.get(key)
    if unsupported:
        return f"it cannot do this workload: {unsupported}"
    runs = measured.runs(standing.candidate.name, key)
    if not runs:
        return "it was not measured"
    if measured.used(standing.candidate.name, key):
        return f"{name} could not be told"
    disturbed = [sentence for run in runs for sentence in run.get("disturbances") or ()]
    return f"every run was disturbed: {disturbed[0]}" if disturbed else "no run has a counted request"
