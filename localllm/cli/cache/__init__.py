"""`localllm cache`: what is kept of prompts, where, and why one was not found."""

from __future__ import annotations

from importlib import import_module

import typer

from localllm.cli.options import command

VERBS = ("stats", "ls", "explain", "warm", "clear")
"""Each is a function of that name in the module of that name."""


def build() -> typer.Typer:
    """Return the group of verbs."""
    app = typer.Typer(help="See, fill and empty what is kept of prompts.", no_args_is_help=True)
    for verb in VERBS:
        app.command(verb)(command(getattr(import_module(f"localllm.cli.cache.{verb}"), verb), f"cache {verb}"))
    return app
