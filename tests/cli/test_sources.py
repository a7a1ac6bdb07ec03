"""A value that a flag cannot take is told with where it comes from: the line, a variable or the settings file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Opened, Result

Cli = Callable[..., Result]
BAD = {
    "kv_ram": ("nonsense", "--kv-ram takes a size such as 4GB, auto or off, not 'nonsense'."),
    "kv_disk": ("99999999TB", "--kv-disk takes at most 4000000TB, not '99999999TB'."),
    "kv_disk_daily": ("x", "--kv-disk-daily takes a size above 0 such as 4GB or 512MiB, not 'x'."),
    "kv_disk_age": ("1e9", "--kv-disk-age takes days above 0, at most 36500, not 1e+09."),
    "threads": ("some", "--threads takes a number from 1 or auto, not 'some'."),
    "ctx": ("0", "--ctx takes a number from 1 or auto, not '0'."),
    "gpu": ("x", "--gpu takes auto, off, all or a number of layers, not 'x'."),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_told_as_the_flags_the_variables_or_the_files(
    cli: Cli, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value, sentence = BAD[name]
    told = cli("run", "model", "hello", f"--{name.replace('_', '-')}", value)
    assert (told.code, sentence in told.err) == (2, True)
    assert "environment" not in told.err
    variable = f"LOCALLLM_{name.upper()}"
    with monkeypatch.context() as patch:
        patch.setenv(variable, value)
        for line in (("run", "model", "hello"), ("config", "show")):
            told = cli(*line)
            assert told.code == 2
            assert told.err == f"error: {variable} in the environment: {sentence}\nhint: unset {variable}\n"
    path = tmp_path / "config.toml"
    path.write_text(f"{name} = {value if name == 'kv_disk_age' else repr(value)}\n")
    monkeypatch.setenv("LOCALLLM_CONFIG", str(path))
    told = cli("run", "model", "hello")
    assert (told.code, told.err) == (2, f"error: {path}: {name}: {sentence}\nhint: edit {path}\n")
    assert not opened.calls
