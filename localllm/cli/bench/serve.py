"""`localllm bench serve`: measure a server that speaks the OpenAI API, or ours on a model."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from localllm.cli.bench.options import Output, Report, ReportForm, RunFlags, chosen_form
from localllm.cli.completion import complete_model
from localllm.cli.failures import Manner, told
from localllm.cli.options import Json, TalkFlags
from localllm.cli.output import Notes

_TARGET_HELP = (
    "Server (http://127.0.0.1:8080, with ?model=NAME where it has several; its key: LOCALLLM_API_KEY), or a model "
    "that `localllm serve` is started for."
)
UrlOrModel: TypeAlias = Annotated[
    str, typer.Argument(metavar="URL|MODEL", help=_TARGET_HELP, autocompletion=complete_model)
]


def serve(
    target: UrlOrModel,
    *,
    run: RunFlags,
    format: Report = None,
    json: Json = False,
    output: Output = None,
    talk: TalkFlags,
) -> None:
    """Measure a server of the OpenAI API.

    Latencies, throughput and goodput of any server (ours, llama-server, Ollama, vLLM, SGLang, LM Studio), or of ours,
    started for a model. The workload is measured cold (nothing was computed before) and warm (what requests share
    was), reported apart. Ctrl-C keeps what was measured.
    """
    form: ReportForm = chosen_form(format, json, "text", "localllm bench serve URL --json")
    with told(Manner(json=form == "json", verbose=talk.verbose)):
        from localllm.cli.bench.destination import Destination
        from localllm.cli.bench.serving import measure, report
        from localllm.cli.bench.wishes import wish_of

        wish = wish_of(run)
        destination = None if output is None else Destination(output)
        report(measure(target, run.api, wish, talk), form, destination, Notes(quiet=talk.quiet))
