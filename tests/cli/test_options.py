"""Flags are written once, and are all settable everywhere."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import typer
from typer.main import get_command

from localllm.cli import main, options
from localllm.cli.app import build_app
from localllm.cli.options import SamplingFlags, command
from localllm.runtime.sampling_params import Sampling


def _verbs(tree: Any) -> list[Any]:
    found = []
    for verb in tree.commands.values():
        found += _verbs(verb) if hasattr(verb, "commands") else [verb]
    return found


@pytest.fixture(scope="module")
def verbs() -> list[Any]:
    """Every verb of the command."""
    return _verbs(get_command(build_app(main.VERBS, main.GROUPS)))


def _flags(verb: Any) -> list[Any]:
    return [p for p in verb.params if p.param_type_name == "option"]


def test_each_flag_has_the_variable_of_its_name(verbs: list[Any]) -> None:
    for verb in verbs:
        for flag in _flags(verb):
            assert flag.envvar == "LOCALLLM_" + flag.name.upper(), (verb.name, flag.name)


def test_a_flag_means_the_same_on_every_verb(verbs: list[Any]) -> None:
    seen: dict[str, tuple[Any, ...]] = {}
    for verb in verbs:
        for flag in _flags(verb):
            facts = (sorted(flag.opts), flag.type.name, flag.help, flag.multiple)
            assert seen.setdefault(flag.name, facts) == facts, (verb.name, flag.name)


def test_spellings_of_one_verb_do_not_collide(verbs: list[Any]) -> None:
    for verb in verbs:
        spellings = [s for flag in _flags(verb) for s in flag.opts]
        assert len(spellings) == len(set(spellings)), verb.name


def test_every_flag_and_verb_says_what_it_does(verbs: list[Any]) -> None:
    for verb in verbs:
        assert verb.help, verb.name
        assert all(flag.help for flag in _flags(verb)), verb.name


def test_sampling_flags_are_settings_of_the_sampler() -> None:
    settings = {f.name for f in fields(Sampling)}
    assert {f.name for f in fields(SamplingFlags)} - settings == {"max_tokens", "seed", "stop"}


def test_groups_become_one_parameter_a_flag() -> None:
    seen: list[Any] = []

    @partial(command, verb="verb")
    def verb(name: str, *, talk: options.TalkFlags, json: options.Json = False) -> None:
        seen.append((name, talk, json))

    assert list(inspect.signature(verb).parameters) == ["name", "verbose", "quiet", "json"]
    verb(name="x", verbose=True, quiet=False, json=False)
    assert seen == [("x", options.TalkFlags(verbose=True), False)]


def test_failure_of_a_verb_becomes_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    @partial(command, verb="verb")
    def verb() -> None:
        raise ValueError("inside")

    with pytest.raises(typer.Exit) as end:
        verb()
    assert end.value.exit_code == 1
    assert "ValueError" in capsys.readouterr().err
