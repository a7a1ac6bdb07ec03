"""Turns bursts that were taken in turn into figures: ratios in pairs, with the spread of the pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localllm.bench.stats.summaries import Estimate, estimate, median, paired_ratio
from proof.sides import Burst, BurstFailed, Side

Round = Mapping[str, Burst]
"""What each side made of the same prompts, by its name."""

OURS, ENGINE, BARE = "localllm serve", "the engine in process", "the bare loop"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is asked for. `low` and `high`: its 95 % interval, where it has one; `n` pairs or samples."""

    what: str
    asked: float
    at_least: bool
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 1

    @property
    def reached(self) -> bool:
        """Whether it is what was asked for."""
        return self.value >= self.asked if self.at_least else self.value <= self.asked

    def line(self) -> dict[str, Any]:
        """Return it for the result file."""
        return {**asdict(self), "reached": self.reached}


@dataclass(slots=True)
class Turns:
    """Lets sides answer the same prompts in turn. `left_out`: who is out of it, and why. Mutated by `take`.

    `prompts(n)` draws prompts that nobody saw yet.
    """

    sides: list[Side]
    prompts: Callable[[int], Sequence[Sequence[int]]]
    left_out: dict[str, str]

    def take(self, n_at_once: int, n_gen: int, n_rounds: int) -> list[dict[str, Burst]]:
        """Return `n_rounds` rounds, each with another side first, every other one backwards; one before is not counted.

        A server of others that fails is left out from then on, and of the rounds before.
        Raises: BurstFailed of a side of ours.
        """
        rounds = []
        for turn in range(-1, n_rounds):
            drawn = self.prompts(n_at_once)
            found = {side.name: self._burst(side, drawn, n_gen) for side in self._order(turn)}
            self.sides = [side for side in self.sides if side.name not in self.left_out]
            if turn >= 0:
                rounds.append(found)
        names = [side.name for side in self.sides]
        return [{name: burst for name in names if (burst := found[name]) is not None} for found in rounds]

    def _order(self, turn: int) -> list[Side]:
        first = turn // 2 % len(self.sides)
        order = [*self.sides[first:], *self.sides[:first]]
        return order[::-1] if turn % 2 else order

    def _burst(self, side: Side, drawn: Sequence[Sequence[int]], n_gen: int) -> Burst | None:
        try:
            return side.burst(drawn, n_gen)
        except BurstFailed as error:
            if side.name in (OURS, ENGINE, BARE):
                raise
            self.left_out[side.name] = str(error)
            return None


def speed_ratio(rounds: Sequence[Round], other: str) -> Estimate:
    """Return our tokens a second over another's, in pairs."""
    return paired_ratio([r[OURS].tokens_per_s for r in rounds], [r[other].tokens_per_s for r in rounds])


def decode_ratio(rounds: Sequence[Round], other: str) -> Estimate:
    """Return our pace after the first token over another's (above 1 = we are faster), in pairs."""
    return paired_ratio([r[other].pace_ms for r in rounds], [r[OURS].pace_ms for r in rounds])


def ttft_above(rounds: Sequence[Round], other: str) -> Estimate:
    """Return the milliseconds that our first token comes later than another's, in pairs."""
    return estimate([median(r[OURS].ttft_ms) - median(r[other].ttft_ms) for r in rounds])


def figure(what: str, asked: float, found: Estimate, *, at_least: bool, unit: str = "") -> Figure:
    """Return the figure of an estimate."""
    return Figure(what, asked, at_least, found.median, unit, found.low, found.high, found.n)


def cpu_figure(rounds: Sequence[Round], n_at_once: int, asked_ms: float) -> Figure | None:
    """Return the CPU time of the HTTP process a streamed token; None where it was not measured."""
    spent = [1e3 * r[OURS].cpu_s / r[OURS].n_tokens for r in rounds if r[OURS].cpu_s is not None]  # type: ignore[operator]
    if not spent:
        return None
    what = f"CPU of the HTTP process a streamed token, {n_at_once} stream{'s' if n_at_once > 1 else ''}"
    return figure(what, asked_ms, estimate(spent), at_least=False, unit="ms")


def outside_figure(rounds: Sequence[Round]) -> Figure | None:
    """Return what HTTP, pipe and client add to the first token by the server's own clock; None where it tells none.

    The same question as the difference of two runs, without the noise of two prefills.
    """
    spent = [ms for r in rounds for ms in r[OURS].outside_ms]
    if not spent:
        return None
    what = "1 client: first token, time outside queue and prefill"
    return figure(what, 5.0, estimate(spent), at_least=False, unit="ms")


def burst_figures(rounds: Sequence[Round], n_at_once: int) -> list[Figure]:
    """Return what is asked of `n_at_once` clients, against every other side that took part."""
    if not rounds:
        return []
    others = [name for name in rounds[0] if name not in (OURS, ENGINE, BARE)]
    found: list[Figure | None] = []
    if n_at_once == 1:
        ratio = decode_ratio(rounds, ENGINE)
        found.append(figure("1 client: tokens/s of decode over the engine's in process", 0.97, ratio, at_least=True))
        above = ttft_above(rounds, ENGINE)
        found.append(
            figure("1 client: first token after the engine's in process", 5.0, above, at_least=False, unit="ms")
        )
        found.append(outside_figure(rounds))
        found.append(cpu_figure(rounds, 1, 0.5))
    else:
        ratio = speed_ratio(rounds, BARE)
        found.append(figure(f"{n_at_once} clients: tokens/s over the bare loop's", 0.95, ratio, at_least=True))
        for name in others:
            ratio = speed_ratio(rounds, name)
            found.append(figure(f"{n_at_once} clients: tokens/s over {name}", 1.0, ratio, at_least=True))
        if n_at_once == 8:
            found.append(cpu_figure(rounds, 8, 0.2))
    return [one for one in found if one is not None]


def table(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return one line a side: the medians of its rounds."""
    if not rounds:
        return []
    return [
        {
            "side": name,
            "tokens_per_s": round(median([r[name].tokens_per_s for r in rounds]), 2),
            "decode_tokens_per_s_each": round(1e3 / median([r[name].pace_ms for r in rounds]), 2),
            "ttft_ms": round(median([median(r[name].ttft_ms) for r in rounds]), 1),
            "speed_ratio": _plain(speed_ratio(rounds, name)) if name != OURS else None,
            "decode_ratio": _plain(decode_ratio(rounds, name)) if name != OURS else None,
        }
        for name in rounds[0]
    ]


def _plain(found: Estimate) -> list[float]:
    return [round(value, 4) for value in (found.median, found.low, found.high)]


def samples(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return every burst, for who wants to look closer."""
    return [{name: asdict(burst) for name, burst in found.items()} for found in rounds]
