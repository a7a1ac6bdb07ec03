"""Sources are valid Python of the wanted length; edits and holes fit them."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest

from localllm.bench.workloads.code_edit import edit
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.fim import holes
from localllm.bench.workloads.source import write_source
from localllm.bench.workloads.source_forms import FORMS


@pytest.mark.parametrize("length", [1, 60, 300, 3_000])
def test_sources_are_python_of_about_the_wanted_length(length: int) -> None:
    for seed in range(12):
        source = write_source(Draws("source", seed), length)
        tree = ast.parse(source.text)
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert [function.name for function in source.functions] == defined[1:]
        if length >= 300:
            assert len(source.text.split()) == pytest.approx(length, abs=50)


def test_every_form_is_python_on_its_own() -> None:
    filled = {
        word: f"x{at}"
        for at, word in enumerate(
            ("name", "noun", "nouns", "other", "attribute", "second", "parameter", "docstring", "adjective")
        )
    }
    for form in FORMS:
        text = form.format(**filled, default=5, small=3, large=700)
        assert len(ast.parse(text).body) == 1
        assert compile(text, "<form>", "exec")


def test_functions_are_named_once_with_the_facts_that_an_edit_needs() -> None:
    source = write_source(Draws("facts"), 20_000)
    names = [function.name for function in source.functions]
    assert len(names) == len(set(names)) > 200
    for function in source.functions[:50]:
        assert f'"""{function.docstring}"""' in source.text
        assert f"{function.parameter}: int = {function.default})" in source.text
    for name, value in source.constants:
        assert f"\n{name} = {value}\n" in source.text


def test_an_edit_names_something_that_the_file_has() -> None:
    kinds = set()
    for seed in range(60):
        draws = Draws("edit", seed)
        source = write_source(draws, 150)
        request = edit(draws, source)
        kinds.add(request.split()[0] + request.split()[1][:3])
        named = {function.name for function in source.functions} | {name for name, _ in source.constants}
        assert named & set(re.findall(r"\w+", request)), request
        assert request.endswith(".")
    assert len(kinds) >= 5


@pytest.mark.parametrize(
    ("before", "after", "n"), [(1, 1, 1), (150, 60, 3), (400, 30, 12), (40, 900, 5), (1, 1, 1_000)]
)
def test_holes_filled_give_python_and_go_down_the_file(before: int, after: int, n: int) -> None:
    for seed in range(2 if n > 100 else 12):
        found = holes(Draws("holes", seed), before, after, n)
        assert len(found) == n
        for hole in found:
            assert hole.middle.strip()
            assert "\n" not in hole.middle
            assert hole.after.startswith("\n")
        for upper, lower in pairwise(found):
            assert lower.before.startswith(upper.before + upper.middle + "\n")
        # What follows is cut after some words, so only a file up to a whole block can be parsed.
        whole = found[-1].before + found[-1].middle + found[-1].after
        ast.parse(whole[: _last_block(whole)])


def _last_block(text: str) -> int:
    """Return where the last function that is surely whole ends."""
    return text.rfind("\n\n\n") + 1 or len(text)
