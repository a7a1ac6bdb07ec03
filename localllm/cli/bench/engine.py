"""`localllm bench engine`: measure a model in this process."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from localllm.cli.bench.options import FORMAT_HELP, chosen_form
from localllm.cli.bench.remembering import keep_in_history
from localllm.cli.failures import AfterOutput, Manner, told
from localllm.cli.options import Json, LoadFlags, ModelOrVerb, option
from localllm.cli.output import Answer, Notes

Form: TypeAlias = Literal["md", "json", "jsonl", "csv"]
Format: TypeAlias = Annotated[Form | None, option("--format", metavar="md|json|jsonl|csv", help=FORMAT_HELP)]


def engine(model: ModelOrVerb = None, format: Format = None, json: Json = False, *, load: LoadFlags) -> None:
    """Measure prefill, decode, start and memory.

    In process, against a bare loop over llama.cpp; a quiet machine gives the best figures. Written as Markdown unless
    --format says otherwise.
    """
    form: Form = chosen_form(format, json, "md", "localllm bench --json")
    with told(Manner(json=form == "json")):
        _engine(model, form, load)


def _engine(model: str | None, form: Form, load: LoadFlags) -> None:
    from localllm.bench.engine.formats import document, render
    from localllm.bench.engine.opener import Opener
    from localllm.bench.engine.plan import Plan, measure
    from localllm.bench.engine.recorder import Recorder
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
    report = recorder.report(partial=stopped is not None)
    out.write(render(report, form))
    keep_in_history(document(report), None, notes)
    if stopped is not None:
        notes.say("interrupted: this is what was measured until then")
        raise AfterOutput(stopped)
