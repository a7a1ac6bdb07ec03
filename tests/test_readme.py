"""The README shows only what works: its commands, flags, targets and its library example."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from localllm.cli import main
from localllm.cli.app import build_app
from tests.conftest import PROJECT

TEXT = (PROJECT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))


def commands() -> list[str]:
    """Return every call of localllm in the README's shell blocks and inline code, without what surrounds it."""
    lines = [re.sub(r"\s+#.*", "", line) for line in SHELL.splitlines()]
    pieces = [piece.strip() for line in lines for piece in re.split(r"\s[|]\s", line)]
    found = [re.split(r"\s[<>]\s", piece)[0] for piece in pieces if piece.startswith("localllm ")]
    return found + re.findall(r"`(localllm [a-z]+[^`]*)`", TEXT)


@pytest.mark.parametrize("command", commands())
def test_command_of_the_readme_has_its_verb_and_flags(command: str) -> None:
    root = get_command(build_app(main.VERBS, main.GROUPS))
    assert hasattr(root, "commands")
    words = shlex.split(command)[1:]
    if words[0] == "VERB":
        words[0] = "run"
    verb = root.commands[words[0]]
    if hasattr(verb, "commands") and len(words) > 1 and words[1] in verb.commands:
        verb = verb.commands[words[1]]
    known = {"--help"} | {spelling for parameter in verb.params for spelling in parameter.opts}
    flags = {word for word in words[1:] if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert flags <= known


def test_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", TEXT)) <= targets


def test_paths_of_the_readme_exist() -> None:
    linked = re.findall(r"\]\(([\w./-]+)\)", TEXT)
    named = re.findall(r"^\| (`[^|]+) \|", TEXT, re.MULTILINE)
    paths = linked + [path for row in named for path in re.findall(r"`([\w./]+)`", row)]
    assert [path for path in paths if not (PROJECT / path).exists()] == []


@pytest.mark.real
def test_library_example_of_the_readme_runs(smollm2: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = example.replace('"smollm2:135m"', repr(str(smollm2)))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5
