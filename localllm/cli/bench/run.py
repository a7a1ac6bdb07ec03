"""`localllm bench run`: measure what a contract says, and judge its rules."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli.bench.options import Output
from localllm.cli.failures import Manner, told
from localllm.cli.options import Json, TalkFlags

_CONTRACT_HELP = (
    "A contract (`localllm bench init > contract.toml`), or the name of a shipped one: apple-laptop, "
    "nvidia-workstation. The key of servers given by their url: LOCALLLM_API_KEY."
)


def run(
    contract: Annotated[str, typer.Argument(metavar="FILE|NAME", help=_CONTRACT_HELP)],
    *,
    output: Output = None,
    json: Json = False,
    talk: TalkFlags,
) -> None:
    """Measure what a contract says, and judge its rules.

    Every candidate is measured in turn, round after round. Writes three files, NAME-result.json, .md and .html (-o
    names them otherwise), and the Markdown to stdout. Exit code 10: a rule does not hold. Ctrl-C keeps what was
    measured.
    """
    with told(Manner(json=json, verbose=talk.verbose)):
        from localllm.cli.bench.contract import measure_contract

        measure_contract(contract, output, "json" if json else "md", talk)
