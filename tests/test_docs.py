"""The generated pages say what the command says today."""

from __future__ import annotations

import pytest

from docs.generate import FOLDER, pages


@pytest.mark.parametrize("name", ["cli.md", "config.md", "workloads.md"])
def test_committed_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == pages()[name], "run: make docs"


def test_pages_name_no_place_of_this_machine() -> None:
    assert "/home/" not in "".join(pages().values())


def test_help_is_spelt_as_the_command_spells_it() -> None:
    helps = pages()["cli.md"].split("```text\n")[1:]
    assert all("  -h, --help " in text for text in helps)
