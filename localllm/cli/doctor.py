"""`localllm doctor`: what this installation and this machine are, what would be used, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from localllm.cli.options import ApiKeyFile, Json, TalkFlags, option

if TYPE_CHECKING:
    from localllm.cli.checks import Finding

_MARKS = {"ok": "", "note": "  (!)", "wrong": "  <- WRONG"}


ServerUrl: TypeAlias = Annotated[
    str | None,
    option("--server", metavar="URL", help="Examine a running server from outside instead: what is exposed."),
]


def doctor(talk: TalkFlags, server: ServerUrl = None, api_key_file: ApiKeyFile = None, json: Json = False) -> None:
    """Examine this installation and machine.

    Versions and build flags, CPU, memory, devices, caches, what would be used and why, known-bad versions.
    Exit code 1 where something is wrong.
    """
    from localllm.cli.checks import examine
    from localllm.cli.output import Answer, Notes

    if server is None:
        findings = examine()
    else:
        from localllm.cli.api_key import read_api_key
        from localllm.cli.http_client import Address
        from localllm.cli.server_checks import examine_server

        notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
        findings = examine_server(Address.parse(server), read_api_key(api_key_file, notes))
    wrong = [finding for finding in findings if finding.state == "wrong"]
    if json:
        from dataclasses import asdict

        Answer().document({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        Answer().write(_report(findings))
    if wrong:
        raise typer.Exit(1)


def _report(findings: list[Finding]) -> str:
    from localllm.cli.tables import printable

    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(("\n" if lines else "") + section)
        lines.append(f"  {finding.name.ljust(width)}  {printable(finding.value)}{_MARKS[finding.state]}".rstrip())
        if finding.advice:
            lines.append(f"  {' ' * width}  -> {printable(finding.advice)}")
    n_wrong = sum(finding.state == "wrong" for finding in findings)
    verdict = f"{n_wrong} of these {'is' if n_wrong == 1 else 'are'} wrong" if n_wrong else "nothing is wrong"
    return "\n".join([*lines, "", verdict, ""])
