"""`localllm bench record`: keep what is asked of a server, to ask it again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from localllm.cli.bench.options import OUTPUT_HELP
from localllm.cli.failures import Manner, told
from localllm.cli.options import option
from localllm.cli.output import Notes

_KEEP_HELP = "Write prompts down as they are, not filler of the same length."

RecordedUrl: TypeAlias = Annotated[str, typer.Argument(metavar="URL", help="Server to pass requests on to.")]
TraceFile: TypeAlias = Annotated[Path, option("--output", "-o", metavar="FILE", help=OUTPUT_HELP)]
KeepText: TypeAlias = Annotated[bool, option("--keep-text", help=_KEEP_HELP)]


def record(url: RecordedUrl, output: TraceFile, keep_text: KeepText = False) -> None:
    """Record requests through a local proxy.

    Point a client at the address that is printed: chat and text completions pass through unchanged, and become a
    workload that `bench serve --workload replay:FILE` sends again. The file, which must not be there yet, holds a line
    of JSON a request. Ctrl-C ends it.
    """
    with told(Manner()):
        exit_code = _record(url, output, keep_text)
    raise typer.Exit(exit_code)


def _record(url: str, output: Path, keep_text: bool) -> int:
    from localllm.bench.client.calls import Target
    from localllm.bench.record.session import Recording
    from localllm.bench.record.session import record as run
    from localllm.bench.serving.address import without_choice

    notes = Notes()
    target = Target.of_url(without_choice(url)[0])
    return run(Recording(url, target, output, keep_text), notes.say, lambda n: notes.progress(f"{n} requests"))
