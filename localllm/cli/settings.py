"""Where a flag's value comes from besides the command line: the environment, then one TOML file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from localllm.errors import UsageError

PATH_VARIABLE = "LOCALLLM_CONFIG"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag's value where the command line does not give it, and where that comes from."""

    name: str
    value: Any
    origin: str  # "default", "file" or "environment"
    variable: str


def config_path() -> Path:
    """Return the path of the settings file, whether it exists or not."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    from platformdirs import user_config_path

    return user_config_path("localllm") / "config.toml"


def apply_settings(context: typer.Context) -> None:
    """Make the file's values the defaults of every verb below `context`, the root of the whole tree.

    Raises: UsageError naming the file and the key that is unknown or of the wrong type.
    """
    path = config_path()
    values = read_settings(path)
    if values:
        options = options_of(context.command)
        check_settings(values, options, path, context)
        context.default_map = _defaults(context.command, {n: _as_given(v, options[n]) for n, v in values.items()})


def read_settings(path: Path) -> dict[str, Any]:
    """Return the file's table; empty where there is no file. Raises UsageError where it is no TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        if os.environ.get(PATH_VARIABLE):
            raise UsageError(f"{PATH_VARIABLE} names {path}, which is not there.", f"unset {PATH_VARIABLE}") from None
        return {}
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "localllm config path") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is too large for a settings file.", "localllm config path")
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise UsageError(f"{path} is not TOML: it is nested too deeply.", "correct it or move it away") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}.", "correct it or move it away") from None


def told_value(name: str, check: Callable[[str, str], object]) -> str | None:
    """Return what a variable or the file sets a flag to, and which does; None where it is left to itself.

    Raises: UsageError as `check` does, which takes where the text is from and the text.
    """
    variable, path = f"LOCALLLM_{name.upper()}", config_path()
    text, origin, hint = os.environ.get(variable, ""), variable, f"unset {variable}"
    if not text:
        with contextlib.suppress(UsageError):
            text = str(read_settings(path).get(name, ""))
            origin, hint = f"{name} in {path}", f"edit {path}"
    if text in ("", "auto"):
        return None
    try:
        check(origin, text)
    except UsageError as error:
        raise UsageError(error.message, hint) from None
    return f"--{name} {text}, as {origin} says"


def check_settings(values: Mapping[str, Any], options: Mapping[str, Any], path: Path, context: typer.Context) -> None:
    """Raise UsageError for the first key that no flag has, or whose value the flag cannot take."""
    for name, value in values.items():
        option = options.get(name)
        if option is None:
            import difflib

            close = difflib.get_close_matches(name.replace("-", "_"), options, 1)
            hint = f"did you mean {close[0]}?" if close else "localllm config show lists the keys"
            raise UsageError(f"{path}: there is no setting {name!r}.", hint)
        _check_value(name, value, option, path, context)


def options_of(command: Any) -> dict[str, Any]:
    """Return every flag that can be set, by key: what `command` and the verbs under it take together."""
    found = {parameter.name: parameter for parameter in command.params if parameter.envvar}
    for verb in _verbs_of(command).values():
        found = {**options_of(verb), **found}
    return found


def current_settings(root: Any) -> list[Setting]:
    """Return all settings in the order of their names. Raises UsageError for a bad file or variable."""
    values, options = read_settings(config_path()), options_of(root.command)
    check_settings(values, options, config_path(), root)
    return [_setting(name, options[name], values, root) for name in sorted(options)]


def _setting(name: str, option: Any, values: Mapping[str, Any], context: typer.Context) -> Setting:
    origin, value = "environment", option.value_from_envvar(context)
    if value is None and name in values:
        origin, value = "file", _as_given(values[name], option)
    elif value is None:
        origin, value = "default", option.get_default(context)
    try:
        converted = option.process_value(context, value)
    except (typer.TyperException, UsageError) as error:
        raise UsageError(f"{option.envvar} in the environment: {error}", f"unset {option.envvar}") from None
    return Setting(name, _plain(converted), origin, option.envvar)


def _defaults(command: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default map of `command`: the values, and the same again for each verb below."""
    return {**values, **{name: _defaults(verb, values) for name, verb in _verbs_of(command).items()}}


def _verbs_of(command: Any) -> Mapping[str, Any]:
    verbs: Mapping[str, Any] = vars(command).get("commands", {})
    return verbs


def _as_given(value: Any, option: Any) -> Any:
    return [value] if option.multiple and not isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _check_value(name: str, value: Any, option: Any, path: Path, context: typer.Context) -> None:
    wanted = _wanted(option)
    items = value if isinstance(value, list) and option.multiple else [value]
    if not all(_fits(item, wanted, takes_number=_takes_number(option)) for item in items):
        words = "a text or a whole number" if _takes_number(option) else "a text"
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: words}[wanted]
        plural = " or a list of them" if option.multiple else ""
        raise UsageError(f"{path}: {name} must be {kind}{plural}, not {value!r}.", f"edit {path}")
    try:
        option.process_value(context, _as_given(value, option))
    except (typer.TyperException, UsageError) as error:
        raise UsageError(f"{path}: {name}: {error}", f"edit {path}") from None


def _wanted(option: Any) -> type:
    if option.is_flag:
        return bool
    return next((kind for kind in (int, float) if option.type.name.startswith(kind.__name__)), str)


def _takes_number(option: Any) -> bool:
    """Say whether a flag takes a text or a number, as its metavar tells: `N|auto`."""
    return "N" in (option.metavar or "").split("|")


def _fits(value: Any, wanted: type, *, takes_number: bool) -> bool:
    """Say whether a TOML value can stand for a flag of this type (`--ctx N|auto` is a text or a number)."""
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if isinstance(value, int):
        return wanted is not str or takes_number
    return isinstance(value, wanted)
