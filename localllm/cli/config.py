"""`localllm config`: which settings hold, and where each comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli.options import Json, command, option
from localllm.cli.output import Answer

Origin = Annotated[bool, option("--origin", help="Where each value comes from: default, file or environment.")]


def build() -> typer.Typer:
    """Return the group of verbs."""
    app = typer.Typer(help="Show the settings and their file.", no_args_is_help=True)
    app.command("show")(command(show, "config show"))
    app.command("path")(command(path, "config path"))
    return app


def show(context: typer.Context, origin: Origin = False, json: Json = False) -> None:
    """Print every setting: what a verb takes where its flag is not given."""
    from localllm.cli.settings import config_path, current_settings

    settings = current_settings(context.find_root())
    out = Answer()
    if json:
        table = {s.name: {"value": s.value, "origin": s.origin, "variable": s.variable} for s in settings}
        out.document({"path": str(config_path()), "settings": table})
        return
    sources = {"file": str(config_path()), "default": "default"}
    for setting in settings:
        where = f"  # {sources.get(setting.origin, setting.variable)}" if origin else ""
        unset = setting.value is None
        out.write(f"# {setting.name} is not set\n" if unset else f"{setting.name} = {_shown(setting.value)}{where}\n")


def path() -> None:
    """Print the path of the settings file, whether it exists or not."""
    from localllm.cli.settings import config_path

    Answer().write(f"{config_path()}\n")


def _shown(value: object) -> str:
    """Return a value as the file spells it: JSON's texts, numbers and lists are TOML's."""
    import json

    return json.dumps(value, ensure_ascii=False)
