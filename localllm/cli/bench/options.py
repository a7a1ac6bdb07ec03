"""Flags that more than one verb of `bench` takes, written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar, cast

from localllm.cli.options import SEED_HELP, option
from localllm.errors import UsageError

FORMAT_HELP = "Form of what is written to stdout; --json is short for --format json."
"""Of every verb's `--format`; which forms there are, its metavar says."""

_WORKLOAD_HELP = (
    "What is asked: chat, rag, agent, code-edit, json, story, fim, batch, mixed:chat=.6,rag=.3,story=.1 or "
    "replay:FILE; NAME:key=value,... sets its lengths, cache=cold+warm+restart what was computed before."
)
_REQUESTS_HELP = "Counted requests of a run. Default: 32, without limit under --duration, all of a trace."
_CONCURRENCY_HELP = (
    "Clients that send one request after another; several loads: 1,4,16; sweep: 1, 2, 4, ... to the knee. "
    "Default: 1, a trace at its recorded times."
)
_RATE_HELP = (
    "Requests a second that arrive whatever became of those before; several: 1,2,4; sweep: shares of what the server "
    "can do; R:gamma=SHAPE below 1 is burstier than Poisson."
)
_DURATION_HELP = "No request of a run begins later than this (60, 90s, 5m); with --requests: whichever is first."
_SLO_HELP = "Limits that make an answer good: ttft_p95=500ms,tpot_p95=60ms,error=0."
OUTPUT_HELP = (
    "File to write: a trace, or a result as JSON, or as Markdown or HTML where it ends in .md or .html (bench run: all "
    "three)."
)
"""Of every verb's `-o`."""

ReportForm: TypeAlias = Literal["text", "md", "json", "html"]
Report: TypeAlias = Annotated[ReportForm | None, option("--format", metavar="text|md|json|html", help=FORMAT_HELP)]
Output: TypeAlias = Annotated[Path | None, option("--output", "-o", metavar="FILE", help=OUTPUT_HELP)]


F = TypeVar("F", bound=str)


def chosen_form(format: F | None, json: bool, otherwise: F, example: str) -> F:
    """Return the form that --format and --json ask for. Raises UsageError, with `example`, where they ask for two."""
    if json and format not in (None, "json"):
        raise UsageError(f"--json is short for --format json; --format {format} asks for another.", example)
    return cast(F, "json") if json else format or otherwise


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What is asked of a server, how often, and how it comes."""

    api: Annotated[
        Literal["openai-chat", "openai-completions"],
        option("--api", metavar="openai-chat|openai-completions", help="Route that conversations are sent to."),
    ] = "openai-chat"
    workload: Annotated[str, option("--workload", metavar="NAME", help=_WORKLOAD_HELP)] = "chat"
    requests: Annotated[int | None, option("--requests", min=1, metavar="N", help=_REQUESTS_HELP)] = None
    concurrency: Annotated[str | None, option("--concurrency", metavar="N|N,N,...|sweep", help=_CONCURRENCY_HELP)] = (
        None
    )
    rate: Annotated[str | None, option("--rate", metavar="R|R,R,...|sweep", help=_RATE_HELP)] = None
    duration: Annotated[str | None, option("--duration", metavar="SECONDS", help=_DURATION_HELP)] = None
    slo: Annotated[str | None, option("--slo", metavar="LIMITS", help=_SLO_HELP)] = None
    warmup: Annotated[
        int, option("--warmup", min=0, metavar="N", help="Requests of the same shape before those that count.")
    ] = 2
    seed: Annotated[int, option("--seed", metavar="N", help=SEED_HELP)] = 1
