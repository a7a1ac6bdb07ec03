"""Reads values of JSON from a server that may send anything: what is not of the kind is nothing."""

from __future__ import annotations

from typing import Any

MAX_COUNT = 1 << 53


def as_dict(value: Any) -> dict[str, Any]:
    """Return an object; {} for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return an array; [] for anything else."""
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    """Return a string; "" for anything else."""
    return value if isinstance(value, str) else ""


def as_count(value: Any) -> int | None:
    """Return a count that came as 7, 7.0, "7" or "7.0"; None for anything else, and for what no count can be."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        count = float(value)
    except (ValueError, OverflowError):
        return None
    return int(count) if 0 <= count <= MAX_COUNT and count.is_integer() else None
