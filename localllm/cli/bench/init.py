"""`localllm bench init`: print a contract to change."""

from __future__ import annotations

from typing import Annotated

import typer

from localllm.cli.output import Answer


def init(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A shipped contract: apple-laptop, nvidia-workstation. Left out: one to begin with, for any machine.",
        ),
    ] = None,
) -> None:
    """Print an evaluation contract to change.

    What is measured, on which servers, and what must come out: `localllm bench init > contract.toml`, then
    `localllm bench run contract.toml`.
    """
    from localllm.bench.contract.shipped import START, shipped

    Answer().write(shipped(name or START))
