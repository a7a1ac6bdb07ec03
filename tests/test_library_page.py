"""Every example of docs/library.md runs as it stands, with the model's alias replaced by its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "library.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.real
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs_and_prints(number: int, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = BLOCKS[number].replace('"smollm2:135m"', repr(str(smollm2)))
    exec(compile(code, f"{PAGE.name}, example {number + 1}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) >= 5
