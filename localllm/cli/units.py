"""Sizes and durations as people type them."""

from __future__ import annotations

import re
from typing import Literal

from localllm.errors import UsageError

FOREVER = "forever"

_MOST_BYTES = 4 * 10**18
_MOST_DAYS = 36_500
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)", re.IGNORECASE | re.ASCII)
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(flag: str, text: str) -> int:
    """Return bytes: "4GB" is 4 * 10**9, "4GiB" is 4 * 2**30, "4096" as it is. Raises UsageError naming the flag."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        number, unit, binary = found.groups()
        power = " kmgt".index(unit.lower() or " ")
        n_bytes = int(float(number) * (1024 if binary else 1000) ** power)
        if n_bytes > _MOST_BYTES:
            raise UsageError(f"{flag} takes at most {_MOST_BYTES // 10**12}TB, not {text!r}.", f"{flag} 4GB")
        if n_bytes > 0 and (power or not binary):
            return n_bytes
    raise UsageError(f"{flag} takes a size above 0 such as 4GB or 512MiB, not {text!r}.", f"{flag} 4GB")


def size_or_auto(flag: str, text: str) -> int | None:
    """Return bytes; None for auto, 0 for off. Raises UsageError naming the flag."""
    if text == "auto":
        return None
    if text in ("off", "0"):
        return 0
    if _SIZE.fullmatch(text.strip()) is None:
        raise UsageError(f"{flag} takes a size such as 4GB, auto or off, not {text!r}.", f"{flag} auto")
    return parse_size(flag, text)


def check_days(flag: str, days: float) -> None:
    """Raise UsageError naming the flag for what is no age."""
    if not 0 < days <= _MOST_DAYS:
        raise UsageError(f"{flag} takes days above 0, at most {_MOST_DAYS}, not {days:g}.", f"{flag} 7")


def number_or_auto(flag: str, text: str) -> int | None:
    """Return a flag's whole number from 1, None for auto. Raises UsageError naming the flag."""
    if text == "auto":
        return None
    number = _positive(text)
    if number is None:
        raise UsageError(f"{flag} takes a number from 1 or auto, not {text!r}.", f"{flag} auto")
    return number


def gpu_layers(flag: str, text: str) -> int | Literal["auto", "off", "all"]:
    """Return a number of layers, or the word for it. Raises UsageError naming the flag."""
    choices: dict[str, Literal["auto", "off", "all"]] = {"auto": "auto", "off": "off", "all": "all", "0": "off"}
    number = choices.get(text) or _positive(text)
    if number is None:
        raise UsageError(f"{flag} takes auto, off, all or a number of layers, not {text!r}.", f"{flag} auto")
    return number


def _positive(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0 else None


def parse_duration(flag: str, text: str) -> float | None:
    """Return seconds: "10m", "90s", "1.5h", "45" (seconds); None for "forever". Raises UsageError naming the flag."""
    if text.strip().lower() == FOREVER:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{flag} takes a duration such as 10m, 90s or {FOREVER}, not {text!r}.", f"{flag} 10m")
    number, unit = found.groups()
    return float(number) * _SECONDS[unit.lower()]
