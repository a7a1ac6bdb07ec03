"""Sizes and durations as people type them."""

from __future__ import annotations

import pytest

from localllm.cli.units import parse_duration, parse_size
from localllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("4g", 4 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("100kB", 100_000),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size("--max-memory", text) == n_bytes


@pytest.mark.parametrize("text", ["", "4XB", "GB", "-4GB", "0", "0GB", "1e9", "4 G B", "four", "4iB", "9" * 12, "٤GB"])
def test_what_is_no_size_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--max-memory"):
        parse_size("--max-memory", text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("10m", 600.0),
        ("90s", 90.0),
        ("1.5h", 5400.0),
        ("45", 45.0),
        ("0", 0.0),
        ("250ms", 0.25),
        ("1d", 86400.0),
        ("forever", None),
    ],
)
def test_durations(text: str, duration_s: float | None) -> None:
    assert parse_duration("--keep-alive", text) == duration_s


@pytest.mark.parametrize("text", ["", "m", "-1", "10 minutes", "inf", "nan", "never"])
def test_what_is_no_duration_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-alive"):
        parse_duration("--keep-alive", text)
