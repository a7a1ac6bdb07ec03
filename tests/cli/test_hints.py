"""Hints are lines that run as they stand: their verbs and flags exist, and the model that was named is in them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.main import get_command

from localllm.cli import main
from localllm.cli.app import build_app
from localllm.models.store import Store
from tests.cli.conftest import Opened, Result
from tests.cli.test_ls import put
from tests.conftest import PROJECT

Cli = Callable[..., Result]


def written() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line that stands in our code: as a text, or as the words of `pasteable`."""
    for path in sorted((PROJECT / "localllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(PROJECT)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for line in re.findall(r"^localllm [a-z].*", node.value):
                    yield where, shlex.split(line)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pasteable":
                words = [word.value if isinstance(word, ast.Constant) else "x" for word in node.args]
                if words[0] == "localllm":
                    yield where, [str(word) for word in words]


def test_verbs_and_flags_of_every_hint_exist() -> None:
    root: Any = get_command(build_app(main.VERBS, main.GROUPS))
    found = list(written())
    assert len(found) > 20
    for where, words in found:
        if words[1].startswith("-"):
            continue
        assert words[1] in root.commands, (where, words)
        verb = root.commands[words[1]]
        while len(words) > 2 and words[2] in getattr(verb, "commands", {}):
            verb, words = verb.commands[words[2]], words[1:]
        if words[1] == "bench":
            verb = verb.commands["engine"]
        known = {"--help"} | {spelling for parameter in verb.params for spelling in parameter.opts}
        assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= known, (where, words)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["tokens", "my model", "--decode", "abc"], "localllm tokens 'my model' --decode '1 2 3'"),
        (["tokens", "m", "--encode", "--decode", "3"], "localllm tokens m --encode"),
        (["bench", "--json", "--format", "csv"], "localllm bench --json"),
        (["chat", "m", "--raw"], "localllm run --raw 'Once upon a time'"),
    ],
)
def test_a_hint_names_the_model_that_was_named(cli: Cli, opened: Opened, argv: list[str], hint: str) -> None:
    result = cli(*argv)
    assert result.code == 2
    assert result.err.endswith(f"hint: {hint}\n")


def test_the_hint_of_rm_without_a_terminal_removes(cli: Cli) -> None:
    put("org/alpha")
    told = cli("rm", "alpha", stdin="").err
    hint = told.rpartition("hint: ")[2]
    assert cli(*shlex.split(hint)[1:]).code == 0
    assert Store().list() == []
