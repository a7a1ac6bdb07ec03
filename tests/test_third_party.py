"""THIRD_PARTY.md names every package that the constraints install, and no other."""

from __future__ import annotations

import re

from tests.conftest import PROJECT


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_third_party_page_names_exactly_the_pinned_packages() -> None:
    pinned = re.findall(r"^([A-Za-z0-9._-]+)==", (PROJECT / "constraints.txt").read_text(), re.MULTILINE)
    page = (PROJECT / "THIRD_PARTY.md").read_text().partition("## Models")[0]
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([^|]+) \|", page, re.MULTILINE)
    told = [name for name, _ in rows if name != "package"]
    assert sorted(told) == sorted(canonical(name) for name in pinned)
    assert all(licence.strip() for _, licence in rows)
