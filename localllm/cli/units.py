"""Sizes and durations as people type them."""

from __future__ import annotations

import re

from localllm.errors import UsageError

FOREVER = "forever"

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
        if n_bytes > 0 and (power or not binary):
            return n_bytes
    raise UsageError(f"{flag} takes a size above 0 such as 4GB or 512MiB, not {text!r}.", f"{flag} 4GB")


def parse_duration(flag: str, text: str) -> float | None:
    """Return seconds: "10m", "90s", "1.5h", "45" (seconds); None for "forever". Raises UsageError naming the flag."""
    if text.strip().lower() == FOREVER:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{flag} takes a duration such as 10m, 90s or {FOREVER}, not {text!r}.", f"{flag} 10m")
    number, unit = found.groups()
    return float(number) * _SECONDS[unit.lower()]
