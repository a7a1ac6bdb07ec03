"""`localllm bench golden`: keep what a model answers, and say after an upgrade what moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from localllm.cli.failures import AfterOutput
from localllm.cli.options import Json, Model, command, model_argument
from localllm.cli.output import Answer, Notes
from localllm.errors import RuleFailed

if TYPE_CHECKING:
    from localllm.bench.goldens.golden import Bench

Checked: TypeAlias = Annotated[
    str | None, model_argument("Model to check. Left out: every model of the store that has a golden.")
]


def build() -> typer.Typer:
    """Return the group of verbs."""
    app = typer.Typer(help="Keep what a model answers, and say after an upgrade what moved.", no_args_is_help=True)
    app.command("record")(command(record, "bench golden record"))
    app.command("check")(command(check, "bench golden check"))
    return app


def record(model: Model, json: Json = False) -> None:
    """Keep a model's answers to the shipped prompts.

    Token ids, greedy text and the likeliest tokens at each place, with the fingerprint of machine and software, in the
    user's data folder.
    """
    from localllm.bench.goldens import golden, report

    notes = Notes()
    try:
        kept, path = golden.record(model, _bench(notes))
    finally:
        notes.clear()
    for line in report.recorded_lines(kept):
        notes.say(line)
    if json:
        Answer().document(report.recorded_document(kept, path))


def check(model: Checked = None, json: Json = False) -> None:
    """Ask again, and say what moved since: prompt tokens, text or logprobs; exit 10 if anything did.

    Run it after an upgrade of the wheel, of a driver or of the model.
    """
    from localllm.bench.goldens import golden, report
    from localllm.models.store import Store

    notes, out = Notes(), Answer()
    bench = _bench(notes)
    try:
        checks = golden.check_all(bench, Store()) if model is None else [golden.check(model, bench)]
    finally:
        notes.clear()
    if json:
        out.document(report.check_document(checks))
    else:
        out.write(report.check_text(checks))
    moved = [one.golden["model"]["name"] for one in checks if one.has_moved]
    if moved:
        hint = "if it is meant to be so: localllm bench golden record MODEL"
        raise AfterOutput(RuleFailed(f"Moved from its golden: {', '.join(moved)}.", hint))


def _bench(notes: Notes) -> Bench:
    from localllm import compose
    from localllm.bench.goldens.golden import Bench
    from localllm.cli.signals import in_thread

    return Bench(
        compose, on_progress=lambda what, done, total: notes.progress(f"{what}: {done} of {total}"), load=in_thread
    )
