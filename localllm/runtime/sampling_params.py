"""How tokens are chosen: the settings, their ranges, and what a model gets without any.

No numpy here: the command line and the servers read these names and ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from localllm.errors import UsageError

FALLBACK_TEMPERATURE = 0.8
FALLBACK_MIN_P = 0.05


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of one generation; the defaults here change nothing (temperature 1, all else off).

    The sampler works in this order: logit bias, penalties (repeat, presence, frequency), DRY,
    top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature. Each filter sees the
    probabilities, at temperature 1, of what the filter before it left.

    `temperature` 0 (anything below 0.0001) is greedy: the best token, whatever the filters say.
    Off are: `top_k` 0, `top_p` 1, `min_p` 0, `typical_p` 1, `top_n_sigma` 0, `xtc_probability` 0,
    `repeat_penalty` 1, presence and frequency 0, `dry_multiplier` 0. The penalties look at the
    last `repeat_last_n` tokens of prompt and answer, DRY at `dry_penalty_last_n` (0 = none,
    -1 = all). `logit_bias` holds (token id, addend to its logit).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        """True where the best token is taken and nothing is drawn."""
        return self.temperature < _GREEDY_BELOW


RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "top_n_sigma": (0, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "repeat_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
}
"""The settings that are numbers, with the least and the greatest value."""

LEAST: Mapping[str, tuple[int, str]] = {
    "top_k": (0, "0 turns it off"),
    "repeat_last_n": (-1, "0 turns it off, -1 looks at everything"),
    "dry_allowed_length": (1, "tokens"),
    "dry_penalty_last_n": (-1, "0 turns it off, -1 looks at everything"),
}
"""The settings that are whole numbers, with the least value (the greatest is `MAX_INT`) and what is special."""

MAX_INT = 2**31 - 1
MAX_BIAS = 100
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 128
_GREEDY_BELOW = 1e-4


def resolve(defaults: Sampling, wishes: Mapping[str, Any]) -> Sampling:
    """Return `defaults` with the caller's `wishes` (by field name) put in, each one checked.

    `logit_bias` may be a mapping from id (a number or its decimal spelling) to addend, or pairs.

    Raises: UsageError naming the field: unknown, of another type (a bool is no number), not
    finite, or out of its range.
    """
    return replace(defaults, **{name: _checked(name, value) for name, value in wishes.items()})


def model_defaults(settings: Mapping[str, float]) -> Sampling:
    """Return what a request without sampling fields gets from a model that states `settings`.

    `settings` come from the file or the catalog, by field name. Penalties and anything unknown
    or out of range in them are left out (a penalty nobody asked for spoils code and tables).
    Where nothing usable is stated: temperature 0.8 with min-p 0.05.
    """
    stated: dict[str, Any] = {}
    for name in _OF_MODELS & settings.keys():
        value: Any = settings[name]
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            stated[name] = _checked(name, value)
        except UsageError:
            continue
    return Sampling(**stated) if stated else Sampling(temperature=FALLBACK_TEMPERATURE, min_p=FALLBACK_MIN_P)


_OF_MODELS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold")
)


def _checked(name: str, value: Any) -> Any:
    check = _CHECKS.get(name)
    if check is None:
        known = ", ".join(field.name for field in fields(Sampling))
        raise UsageError(f"there is no sampling setting {name!r}", f"use one of: {known}", field=name)
    return check(name, value)


def _refuse(name: str, wanted: str, value: Any) -> UsageError:
    """Return the refusal; a number is told, a text never: what a caller wrote stays out of errors."""
    shown = f", not {value!r}" if isinstance(value, (int, float)) else ""
    shown = shown if len(shown) <= 46 else shown[:43] + "..."
    return UsageError(f"{name} must be {wanted}{shown}", f"give {name} as {wanted}", field=name)


def _number(low: float, high: float) -> Callable[[str, Any], float]:
    """Return a check for a finite number in [low, high]."""
    wanted = f"a number from {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _refuse(name, wanted, value)
        return float(value)

    return check


def _integer(low: int, meaning: str) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= MAX_INT:
            raise _refuse(name, f"a whole number from {low} ({meaning})", value)
        return value

    return check


def _breakers(name: str, value: Any) -> tuple[str, ...]:
    wanted = f"a list of at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_CHARS} characters"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_BREAKERS:
        raise _refuse(name, wanted, value)
    if not all(isinstance(text, str) and 1 <= len(text) <= MAX_BREAKER_CHARS for text in value):
        raise _refuse(name, wanted, value)
    return tuple(value)


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    wanted = f"a mapping from token id to a number from -{MAX_BIAS} to {MAX_BIAS}"
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise _refuse(name, wanted, value)
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise _refuse(name, wanted, pair)
        token, addend = pair
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)
        if type(token) is not int or not 0 <= token <= MAX_INT:
            raise _refuse(name, wanted, token)
        if type(addend) not in (int, float) or not math.isfinite(addend) or abs(addend) > MAX_BIAS:
            raise _refuse(name, wanted, addend)
        bias[token] = float(addend)
    return tuple(sorted(bias.items()))


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    **{name: _number(low, high) for name, (low, high) in RANGES.items()},
    **{name: _integer(low, meaning) for name, (low, meaning) in LEAST.items()},
    "dry_sequence_breakers": _breakers,
    "logit_bias": _bias,
}
