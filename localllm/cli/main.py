"""The command `localllm`: its verbs, and the one place where a failure becomes a sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from localllm import __version__

if TYPE_CHECKING:
    import typer


VERBS = (  # in the order of --help: module `localllm.cli.<verb>` with the function `<verb>`
)
GROUPS: tuple[str, ...] = (  # module `localllm.cli.<group>` with the function `build() -> typer.Typer`
)


def build_app(verbs: Sequence[str] = (*VERBS, *GROUPS)) -> typer.Typer:
    """Return the command with these verbs; nothing heavy is imported."""
    import typer

    from localllm.cli.options import command

    app = typer.Typer(name="localllm", rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for verb in verbs:
        module = import_module(f"localllm.cli.{verb}")
        if verb in GROUPS:
            app.add_typer(module.build(), name=verb)
        else:
            app.command(verb)(command(getattr(module, verb)))
    return app


def _root() -> None:
    """Run language models on this machine."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code (DESIGN 13)."""
    sys.exit(run_command(sys.argv[1:] if argv is None else argv))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; return its exit code. Failures are told on stderr, never as a traceback."""
    import typer
    from typer.main import get_command

    from localllm.errors import LocalLLMError

    try:
        result = get_command(build_app()).main(list(argv), prog_name="localllm", standalone_mode=False)
    except LocalLLMError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except typer.TyperException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    return result if isinstance(result, int) else 0


def version() -> str:
    """Return the line of `--version`."""
    return f"localllm {__version__}"
