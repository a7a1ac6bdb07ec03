"""`localllm selfcheck`: the whole way of a request, from the file to the last trace of the server, proven here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from localllm.cli.options import Json, ModelOrDefault, TalkFlags

if TYPE_CHECKING:
    from localllm.cli.selfcheck_steps import Step


def selfcheck(model: ModelOrDefault = None, *, talk: TalkFlags, json: Json = False) -> None:
    """Check this installation with a server of its own.

    Records versions and the model's hash, starts a server, proves that it listens on loopback only, asks a fixed prompt
    twice (the second time with the cache off: equal text), watches memory, stops it, and proves that no process, port
    or file is left. Names the layer that failed; exit code 1 then.
    """
    from localllm.cli.output import Answer, Notes
    from localllm.cli.selfcheck_steps import SelfCheck
    from localllm.models import catalog

    out, notes = Answer(), Notes(quiet=talk.quiet, verbose=talk.verbose)
    steps: list[Step] = []
    for step in SelfCheck(model or catalog.DEFAULT_ALIAS).run():
        steps.append(step)
        if not json:
            notes.clear()
            out.write(_line(step))
        notes.progress(f"{step.layer}: {step.told}")
    notes.clear()
    failed = next((step for step in steps if not step.ok), None)
    if json:
        out.document(_document(steps, failed))
    else:
        out.write("all is well\n" if failed is None else f"failed: {failed.layer}\n")
    if failed is not None:
        if failed.error is not None and failed.error.hint:
            notes.say(f"hint: {failed.error.hint}")
        raise typer.Exit(1 if failed.error is None else failed.error.exit_code)


def _line(step: Step) -> str:
    from localllm.cli.tables import printable

    return f"{'ok' if step.ok else 'FAILED':6}  {step.layer:13}  {printable(step.told)}\n"


def _document(steps: list[Step], failed: Step | None) -> dict[str, Any]:
    return {
        "ok": failed is None,
        "failed": None if failed is None else failed.layer,
        "steps": [
            {"layer": s.layer, "ok": s.ok, "told": s.told, "took_s": round(s.took_s, 3), "facts": s.facts}
            for s in steps
        ],
    }
