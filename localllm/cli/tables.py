"""Facts as people read them: aligned tables, sizes, counts and hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NOT_HASHED = "not hashed yet"
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def printable(text: str) -> str:
    """Return `text` with control characters escaped: a file's metadata must not steer the terminal or add lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Return aligned lines, header first; columns in `right` are flush right. Never wraps or cuts."""
    cells = [list(headers), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: list[str]) -> str:
        padded = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "".join(line(row) + "\n" for row in cells)


def pairs(facts: Mapping[str, str]) -> str:
    """Return `name  value` lines, the values in one column."""
    width = max((len(name) for name in facts), default=0)
    return "".join(f"{name.ljust(width)}  {printable(value)}".rstrip() + "\n" for name, value in facts.items())


def size(n_bytes: int) -> str:
    """Return bytes in decimal units: 98 MB, 4.9 GB."""
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.5 else 1
    return f"{value:.{digits}f} {_BYTE_UNITS[unit]}"


def ago(passed_s: float) -> str:
    """Return how long ago something was, in its largest unit: 3 min ago."""
    passed = max(0, int(passed_s))
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= seconds:
            return f"{passed // seconds} {unit} ago"
    return f"{passed} s ago"


def count(n: int) -> str:
    """Return a count in short: 135M, 1.5B."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= factor:
            value = n / factor
            return f"{value:.0f}{unit}" if value >= 100 else f"{value:.1f}{unit}"
    return str(n)


def short_hash(sha256: str | None) -> str:
    """Return the first twelve digits, or say that the file was not hashed yet."""
    return sha256[:12] if sha256 else NOT_HASHED
