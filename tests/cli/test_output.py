"""What is written to stdout: how wide a report may be."""

from __future__ import annotations

import sys

import pytest

from localllm.cli.output import Answer


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (80, 80), (200, 100), (20, 60)])
def test_a_report_is_as_wide_as_the_terminal_within_bounds(
    monkeypatch: pytest.MonkeyPatch, columns: int, width: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert Answer().width(100) == width


def test_a_report_in_a_pipe_is_the_same_at_every_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setenv("COLUMNS", "60")
    assert Answer().width(100) == 100
