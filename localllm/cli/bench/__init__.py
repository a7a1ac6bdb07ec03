"""`localllm bench`: the verbs that measure. `bench MODEL` is short for `bench engine MODEL`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from localllm.cli.options import command
from localllm.errors import UsageError

VERBS = ("engine", "serve", "run", "init", "record", "compare", "history")
"""Each is a function of that name in the module of that name."""

GROUPS = ("golden",)
"""Each is a module with verbs of its own."""


class EngineUnlessNamed(TyperGroup):
    """A group whose sub-command may be left out: it is `engine` then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `engine` in front of what does not begin with a sub-command or ask for help."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            if args and "://" in args[0]:
                raise UsageError(
                    "bench engine measures a model in process, not a server.", f"localllm bench serve {args[0]}"
                )
            args = ["engine", *args]
        return super().parse_args(ctx, args)


def build() -> typer.Typer:
    """Return the group of verbs."""
    app = typer.Typer(cls=EngineUnlessNamed, subcommand_metavar="[engine] [MODEL]")
    app.callback()(_group)
    for verb in VERBS:
        app.command(verb)(command(getattr(import_module(f"localllm.cli.bench.{verb}"), verb), f"bench {verb}"))
    for group in GROUPS:
        app.add_typer(import_module(f"localllm.cli.bench.{group}").build(), name=group)
    return app


def _group() -> None:
    """Measure a model, or any OpenAI-compatible server.

    `bench MODEL` is short for `bench engine MODEL`; its flags: bench engine --help.
    """
