"""`localllm bench`: measure a model on this machine. `bench MODEL` is short for `bench engine MODEL`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperGroup

from localllm.cli.failures import AfterOutput, Manner, told
from localllm.cli.options import Json, LoadFlags, ModelOrVerb, command, option
from localllm.cli.output import Answer, Notes
from localllm.errors import UsageError

_FORMAT_HELP = "Markdown (the default), one JSON document, JSON lines or CSV."
Form: TypeAlias = Literal["md", "json", "jsonl", "csv"]
Format: TypeAlias = Annotated[Form | None, option("--format", metavar="md|json|jsonl|csv", help=_FORMAT_HELP)]


class EngineUnlessNamed(TyperGroup):
    """A group whose sub-command may be left out: it is `engine` then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `engine` in front of what does not begin with a sub-command or ask for help."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["engine", *args]
        return super().parse_args(ctx, args)


def build() -> typer.Typer:
    """Return the group of verbs."""
    app = typer.Typer(cls=EngineUnlessNamed, subcommand_metavar="[engine] [MODEL]")
    app.callback()(_group)
    app.command("engine")(command(engine))
    return app


def _group() -> None:
    """Measure a model on this machine.

    `bench MODEL` is short for `bench engine MODEL`; its flags: bench engine --help.
    """


def engine(model: ModelOrVerb = None, format: Format = None, json: Json = False, *, load: LoadFlags) -> None:
    """Measure prefill, decode, start and memory.

    In process, against a bare loop over llama.cpp; a quiet machine gives the best figures.
    """
    if json and format not in (None, "json"):
        raise UsageError(
            f"--json is short for --format json; --format {format} asks for another.", "localllm bench --json"
        )
    form: Form = "json" if json else format or "md"
    with told(Manner(json=form == "json")):
        _engine(model, form, load)


def _engine(model: str | None, form: Form, load: LoadFlags) -> None:
    from localllm.bench.formats import render
    from localllm.bench.opener import Opener
    from localllm.bench.plan import Plan, measure
    from localllm.bench.recorder import Recorder
    from localllm.cli.signals import Interrupts, Stopped, in_thread
    from localllm.cli.wishes import load_config
    from localllm.models import catalog

    notes, out = Notes(), Answer()
    config = load_config(load)
    if model is None:
        notes.say(f"no model named: this is {catalog.DEFAULT_ALIAS}")
        model = catalog.DEFAULT_ALIAS
    stopped: Stopped | None = None
    recorder = Recorder(lambda what, done, total: notes.progress(f"{what}: {done} of {total}"))
    with Interrupts():
        try:
            measure(Plan(model, config), recorder, Opener(model, in_thread))
        except Stopped as stop:
            stopped = stop
        finally:
            notes.clear()
    out.write(render(recorder.report(partial=stopped is not None), form))
    if stopped is not None:
        notes.say("interrupted: this is what was measured until then")
        raise AfterOutput(stopped)
