"""docs/architecture.md names only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import PROJECT

PAGE = PROJECT / "docs" / "architecture.md"
# `runtime/loop.py` and `runtime/loop.py:EngineLoop.step`, relative to the package.
NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)(?::([A-Za-z_][\w.]*))?`")


def symbols(path: Path) -> set[str]:
    """Return `name` and `Class.member` of everything that a module defines at its top or in a class."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, prefix + node.name + ".")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            # Attributes that `__init__` sets count as members.
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                        found.add(prefix + inner.attr)

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


REFERENCES = sorted({(m[1], m[2] or "") for m in NAMED.finditer(PAGE.read_text(encoding="utf-8"))})


def test_page_names_the_hops_by_symbol() -> None:
    assert len([symbol for _, symbol in REFERENCES if symbol]) >= 8


@pytest.mark.parametrize(("module", "symbol"), REFERENCES)
def test_what_the_page_names_exists(module: str, symbol: str) -> None:
    path = PROJECT / "localllm" / module
    assert path.is_file(), f"the page names {module}, which is not there"
    if symbol:
        assert symbol in symbols(path), f"the page names {module}:{symbol}, which is not there"
