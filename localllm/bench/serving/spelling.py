"""How cache protocols and loads are spelled, on a command line and in contracts."""

from __future__ import annotations

import math
import re

from localllm.bench.serving.series import Loads
from localllm.bench.serving.spec import Cache, Load
from localllm.bench.serving.sweep import Sweep
from localllm.errors import UsageError

MAX_CLIENTS = 4096
RATES_PER_S = (0.001, 100_000.0)
SHAPES = (0.01, 100.0)
_CACHE = re.compile(r"(?:^|(?<=[:,]))cache=([^,]*)(?:,|$)")
_GAMMA = re.compile(r":gamma=([^:]*)$")


def split_cache(text: str) -> tuple[str, tuple[Cache, ...] | None]:
    """Return a workload's text without `cache=...`, and what that asked for; None where it is not there.

    "rag:documents=2,cache=cold+warm" is ("rag:documents=2", (COLD, WARM)). Raises UsageError.
    """
    found = _CACHE.findall(text)
    if not found:
        return text, None
    if len(found) > 1:
        raise UsageError("The workload names cache= twice.", "cache=cold+warm asks for both")
    known = {cache.value: cache for cache in Cache}
    names = [name.strip() for name in found[0].split("+")]
    for name in names:
        if name not in known:
            raise UsageError(f"There is no cache protocol {name!r}; there are {', '.join(known)}.", "cache=cold+warm")
    rest = _CACHE.sub("", text).rstrip(":, ")
    return rest, tuple(dict.fromkeys(known[name] for name in names))


def parse_loads(concurrency: str | None, rate: str | None, *, is_trace: bool) -> Loads:
    """Return the loads that `--concurrency` or `--rate` ask for. Raises UsageError naming the flag.

    Without either: a trace at its recorded times, else one client.
    """
    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency and --rate are two kinds of load: give one of them.", "--concurrency 4")
    if rate is not None:
        return _rates(rate.strip())
    if concurrency is None:
        return Loads((Load(),) if is_trace else (Load(concurrency=1),))
    if concurrency.strip() == "sweep":
        return Loads(sweep=Sweep.CLIENTS)
    return Loads(tuple(dict.fromkeys(Load(concurrency=_clients(part)) for part in concurrency.split(","))))


def _rates(text: str) -> Loads:
    shape = 1.0
    gamma = _GAMMA.search(text)
    if gamma is not None:
        shape, text = _positive(gamma[1], "--rate R:gamma=SHAPE takes a shape"), text[: gamma.start()]
    if text == "sweep":
        return Loads(sweep=Sweep.RATES, shape=shape)
    rates = [_positive(part, "--rate takes requests a second") for part in text.split(",")]
    return Loads(tuple(dict.fromkeys(load_at(rate, shape) for rate in rates)))


def load_at(rate_per_s: float, shape: float = 1.0) -> Load:
    """Return arrivals at a rate. Raises UsageError where no run could keep it, or its bursts."""
    for value, what, (least, most) in ((rate_per_s, "A rate", RATES_PER_S), (shape, "A gamma shape", SHAPES)):
        if not least <= value <= most:
            raise UsageError(f"{what} of arrivals is {least:g} to {most:g}, not {value:g}.", "--rate 2:gamma=0.5")
    return Load(rate_per_s=rate_per_s, shape=shape)


def _clients(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_CLIENTS):
        raise UsageError(
            f"--concurrency takes numbers of clients from 1 to {MAX_CLIENTS}, or sweep, not {text!r}.",
            "--concurrency 1,4,16",
        )
    return int(text)


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{what} above 0, not {text.strip()!r}.", "--rate 2, --rate 1,2,4, --rate sweep:gamma=0.5")
    return value
