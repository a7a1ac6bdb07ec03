"""Settings: flag over variable over file over default, and what is wrong with a file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Opened, Result

Cli = Callable[..., Result]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file that is not written yet."""
    path = tmp_path / "settings.toml"
    monkeypatch.setenv("LOCALLLM_CONFIG", str(path))
    return path


def test_flag_beats_variable_beats_file_beats_default(
    cli: Cli, opened: Opened, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def max_tokens(*flags: str) -> int:
        cli("run", "m", "hi", *flags)
        found: int = opened.calls[-1][2].options.max_tokens
        return found

    settings.write_text("")
    assert max_tokens() == 2048
    settings.write_text("max_tokens = 11")
    assert max_tokens() == 11
    monkeypatch.setenv("LOCALLLM_MAX_TOKENS", "12")
    assert max_tokens() == 12
    assert max_tokens("-n", "13") == 13


def test_every_kind_of_value_can_stand_in_the_file(cli: Cli, opened: Opened, settings: Path) -> None:
    settings.write_text(
        'ctx = 777\ngpu = "off"\ntemperature = 1\ntop_p = 0.5\nstop = ["a b", "c"]\njson = true\nsystem = "s"\n'
    )
    result = cli("run", "m", "hi")
    config, request = opened.calls[0][1:]
    assert (config.ctx, config.gpu) == (777, "off")
    assert dict(request.options.sampling) == {"temperature": 1.0, "top_p": 0.5}
    assert request.options.stop == ("a b", "c")
    assert request.messages[0] == {"role": "system", "content": "s"}
    assert result.json()["finish_reason"] == "stop"


def test_one_text_will_do_for_a_repeatable_flag(cli: Cli, opened: Opened, settings: Path) -> None:
    settings.write_text('stop = "a b"')
    cli("run", "m", "hi")
    assert opened.calls[0][2].options.stop == ("a b",)


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("max_token = 3", "max_token", "max_tokens"),
        ('max_tokens = "3"', "max_tokens", ""),
        ("max_tokens = 0", "max_tokens", ""),
        ("max_tokens = 1.5", "max_tokens", ""),
        ("max_tokens = true", "max_tokens", ""),
        ("json = 1", "json", ""),
        ("temperature = [1]", "temperature", ""),
        ("system = 5", "system", ""),
        ("stop = [1]", "stop", ""),
        ('flash_attn = "maybe"', "flash_attn", ""),
        ("[run]\nmax_tokens = 3", "run", ""),
        ("max_tokens = ", "TOML", ""),
        ("a = " + "[" * 100_000, "TOML", ""),
        ("a = " + "1" * 2_000_000, "large", ""),
    ],
)
@pytest.mark.parametrize("argv", [["run", "m", "hi"], ["config", "show"]])
def test_bad_file_is_named_with_its_key(
    cli: Cli, opened: Opened, settings: Path, text: str, key: str, hint: str, argv: list[str]
) -> None:
    settings.write_text(text)
    result = cli(*argv)
    assert result.code == 2
    assert str(settings) in result.err
    assert key in result.err
    assert hint in result.err
    assert opened.calls == []


def test_endless_file_is_not_read_to_its_end(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", "/dev/zero")
    result = cli("run", "m", "hi")
    assert (result.code, opened.calls) == (2, [])
    assert "too large" in result.err


def test_file_that_is_named_must_be_there(cli: Cli, opened: Opened, settings: Path) -> None:
    result = cli("run", "m", "hi")
    assert (result.code, str(settings) in result.err) == (2, True)


def test_path_is_told_even_of_a_bad_file(cli: Cli, settings: Path) -> None:
    settings.write_text("nonsense")
    assert cli("config", "path") == Result(0, f"{settings}\n", "")


def test_default_place_is_in_the_users_settings(cli: Cli, isolated_home: Path) -> None:
    path = Path(cli("config", "path").out.strip())
    assert path.name == "config.toml"
    assert isolated_home in path.parents


def test_bad_variable_is_named(cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_MAX_TOKENS", "many")
    for argv in (["run", "m", "hi"], ["config", "show"]):
        result = cli(*argv)
        assert (result.code, "LOCALLLM_MAX_TOKENS" in result.err) == (2, True)


def test_show_tells_where_each_value_comes_from(cli: Cli, settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_text("top_k = 7\nstop = 'x'")
    monkeypatch.setenv("LOCALLLM_SEED", "5")
    found = cli("config", "show", "--origin", "--json").json()
    origins = {name: (s["value"], s["origin"]) for name, s in found["settings"].items()}
    assert found["path"] == str(settings)
    assert origins["top_k"] == (7, "file")
    assert origins["stop"] == (["x"], "file")
    assert origins["seed"] == (5, "environment")
    assert origins["ctx"] == ("auto", "default")
    lines = cli("config", "show", "--origin").out.splitlines()
    assert f"top_k = 7  # {settings}" in lines
    assert "seed = 5  # LOCALLLM_SEED" in lines


def test_what_show_prints_is_a_settings_file(cli: Cli, opened: Opened, settings: Path) -> None:
    settings.write_text("top_k = 7\nsystem = 'say \"é\"\\n'")
    shown = cli("config", "show").out
    assert tomllib.loads(shown)["top_k"] == 7
    settings.write_text(shown)
    assert cli("run", "m", "hi").code == 0


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("ctx = true", "ctx must be a text or a whole number, not True"),
        ("system = 3", "system must be a text, not 3"),
        ("max_tokens = 'all'", "max_tokens must be a whole number, not 'all'"),
        ("stop = [1]", "stop must be a text or a list of them, not [1]"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_what_is_right(
    cli: Cli, opened: Opened, settings: Path, line: str, wanted: str
) -> None:
    settings.write_text(line)
    assert wanted in cli("run", "m", "hi").err
