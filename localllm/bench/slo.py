"""A service level objective: limits on measures, as `--slo` and contracts write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localllm.bench.measures import Kind, Measure, measure, text_of, value_of
from localllm.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limit:
    """One measure and the most it may be, in its own unit (the least, where more is better)."""

    measure: Measure
    bound: float

    def holds(self, value: float) -> bool:
        """Say whether `value` keeps the limit."""
        return value <= self.bound if self.measure.lower_is_better else value >= self.bound

    def __str__(self) -> str:
        return f"{self.measure.name}={text_of(self.measure, self.bound).replace(' ', '')}"


@dataclass(frozen=True, slots=True)
class Slo:
    """What is asked of a service. `text` is how it was written."""

    text: str
    limits: tuple[Limit, ...]

    def request_bounds_ms(self) -> Mapping[str, float]:
        """Return the most milliseconds that a single request may take, by latency ("ttft").

        Goodput asks each request to keep the limit whose percentile the whole run is asked to keep.
        """
        found: dict[str, float] = {}
        for limit in self.limits:
            if limit.measure.kind is Kind.LATENCY and limit.measure.statistic:
                base = limit.measure.base
                found[base] = min(limit.bound, found.get(base, limit.bound))
        return found

    def verdicts(self, value: Callable[[str], float | None]) -> list[dict[str, object]]:
        """Return each limit with the value found and whether it holds; what was not measured does not hold."""
        lines: list[dict[str, object]] = []
        for limit in self.limits:
            found = value(limit.measure.name)
            met = found is not None and limit.holds(found)
            lines.append({"measure": limit.measure.name, "limit": limit.bound, "value": found, "met": met})
        return lines


def parse_slo(text: str) -> Slo:
    """Return the objective written as "ttft_p95=500ms,tpot_p95=60ms,error=0". Raises UsageError."""
    limits: list[Limit] = []
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise UsageError(f"--slo: {part.strip()!r} is no limit.", "--slo ttft_p95=500ms,tpot_p95=60ms,error=0")
        of = measure(name.strip())
        if any(limit.measure.name == of.name for limit in limits):
            raise UsageError(f"--slo: {of.name} is limited twice.", "name each measure once")
        limits.append(Limit(of, value_of(of, value)))
    return Slo(text, tuple(limits))
