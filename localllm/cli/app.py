"""The command's tree of verbs, and one run of it from arguments to exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer.main import get_command

from localllm.cli.failures import Manner, flush_stdout, tell, usage_failure
from localllm.cli.options import command
from localllm.cli.output import CLOSED_EXIT_CODE, write_stderr
from localllm.cli.settings import apply_settings, config_path

COMPLETION_VARIABLE = "_LOCALLLM_COMPLETE"
"""Set by the shell's completion script when it asks what could come next."""

_EPILOG = "To begin: localllm run 'Why is the sky blue?' (its flags: run --help)"


def run_command(argv: Sequence[str], verbs: Sequence[str], groups: Sequence[str]) -> int:
    """Run one command line; return its exit code. Failures are told on stderr, never as a traceback.

    Only the verb that is asked for is imported, unless the whole tree is needed.
    """
    manner = Manner(json="--json" in argv, jsonl="--jsonl" in argv)
    try:
        _open_closed_descriptors()
        if argv and argv[0] in verbs and not _needs_whole_tree():
            verbs, groups = [argv[0]], []
        app = build_app(verbs, groups)
        result = get_command(app).main(list(argv), prog_name="localllm", standalone_mode=False)
    except typer.TyperException as error:
        if error.format_message().startswith("Usage:"):  # a verb is missing: typer gives the whole help
            write_stderr(f"{error.format_message()}\n")
            return error.exit_code
        return tell(usage_failure(error), manner)
    except SystemExit as end:
        # Typer itself exits with 1 where nobody reads what it prints.
        result = CLOSED_EXIT_CODE if end.code == 1 else end.code
    except Exception as error:
        return tell(error, manner)
    return flush_stdout(result if isinstance(result, int) else 0)


def build_app(verbs: Sequence[str], groups: Sequence[str]) -> typer.Typer:
    """Return the command with these verbs; nothing heavy is imported."""
    app = typer.Typer(
        name="localllm",
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        epilog=_EPILOG,
        context_settings={"help_option_names": ["-h", "--help"]},  # contexts below inherit it
    )
    app.callback()(_root)
    for verb in verbs:
        app.command(verb)(command(getattr(import_module(f"localllm.cli.{verb}"), verb), verb))
    for group in groups:
        app.add_typer(import_module(f"localllm.cli.{group}").build(), name=group)
    return app


def _needs_whole_tree() -> bool:
    """A settings file is checked against the flags of every verb; completion offers every verb."""
    return COMPLETION_VARIABLE in os.environ or config_path().exists()


def _print_version(asked: bool) -> None:
    if asked:
        from localllm import __version__

        print(f"localllm {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)]


def _root(context: typer.Context, version: Version = False) -> None:
    """Run language models on this machine."""
    if context.invoked_subcommand not in ("config", "doctor"):  # which report on the file itself
        apply_settings(context)


def _open_closed_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed: a model file must not become stdout."""
    for descriptor, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            try:
                os.fstat(descriptor)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
