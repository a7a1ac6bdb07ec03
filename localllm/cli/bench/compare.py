"""`localllm bench compare`: what changed from one file of results to another, and whether a rule failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from localllm.cli.bench.options import FORMAT_HELP, chosen_form
from localllm.cli.failures import Manner, told
from localllm.cli.options import Json, option
from localllm.cli.output import Answer

_FILE_HELP = "Results of localllm bench (serve, run or engine), of llama-bench -o json|jsonl or of vllm bench serve."
_FAIL_HELP = (
    "Exit 10 where one holds: MEASURE>+N% or MEASURE<-N% of change, where its interval is clear of none too; "
    "MEASURE>VALUE or <VALUE of the new file; several: ttft_p95>+5%,output_throughput<-3%,error>0.01."
)
_FORCE_HELP = "Compare what is not comparable (another machine, model, workload, ...); each reason becomes a warning."

Form: TypeAlias = Literal["text", "md", "json"]
Old: TypeAlias = Annotated[Path, typer.Argument(metavar="OLD", help=_FILE_HELP)]
New: TypeAlias = Annotated[Path, typer.Argument(metavar="NEW", help="As OLD.")]
FailOn: TypeAlias = Annotated[str | None, option("--fail-on", metavar="RULES", help=_FAIL_HELP)]
Force: TypeAlias = Annotated[bool, option("--force", help=_FORCE_HELP)]
Format: TypeAlias = Annotated[Form | None, option("--format", metavar="text|md|json", help=FORMAT_HELP)]


def compare(
    old: Old, new: New, fail_on: FailOn = None, force: Force = False, format: Format = None, json: Json = False
) -> None:
    """Compare two files of results.

    Medians and p95 with 95 % intervals that heed how alike neighbouring requests are, Mann-Whitney for medians, a
    verdict for each; refuses what is not comparable.
    """
    form: Form = chosen_form(format, json, "text", "localllm bench compare --json")
    with told(Manner(json=form == "json")):
        _compare(old, new, fail_on, force, form)


def _compare(old: Path, new: Path, fail_on: str | None, force: bool, form: Form) -> None:
    from localllm.bench.compare.comparison import compare
    from localllm.bench.compare.fail_on import judged, parse_rules
    from localllm.bench.compare.read import read_results
    from localllm.bench.compare.report import WIDTH, Report, render

    rules = () if fail_on is None else parse_rules(fail_on)
    a, b = read_results(old), read_results(new)
    comparison = compare(a, b, force=force, also=[rule.measure for rule in rules])
    report = Report(comparison, judged(rules, comparison, [*a, *b]))
    answer = Answer()
    answer.write(render(report, form, answer.width(WIDTH)))
    if not report.passed:
        raise typer.Exit(10)
