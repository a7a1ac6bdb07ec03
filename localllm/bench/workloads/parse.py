"""Workloads by their text: `chat`, `rag:documents=2`, `mixed:chat=.6,story=.4`, `replay:FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.bench.workloads.ask import Workload
    from localllm.bench.workloads.recipe import Recipe

NAMES = ("chat", "rag", "agent", "code-edit", "json", "story", "fim", "batch", "mixed", "replay")


def parse_workload(text: str) -> Workload:
    """Return the workload that `text` names, with its parameters. Raises UsageError, a sentence each."""
    name, rest = _split(text)
    if name == "replay":
        from pathlib import Path

        from localllm.bench.workloads.replay import replay

        if not rest:
            raise UsageError("The workload replay needs the file of a recorded trace.", "--workload replay:FILE")
        return replay(Path(rest))
    if name == "mixed":
        from localllm.bench.workloads.mixed import mixed

        return mixed(rest, _recipe)
    return _recipe(name).workload(rest)


def describe(name: str) -> str:
    """Return what the workload `name` asks and what can be set, as lines of help. Raises UsageError."""
    if name == "mixed":
        parts = ", ".join(part for part in NAMES if part not in ("mixed", "replay"))
        return (
            "mixed: sessions of several workloads in turn, each with its defaults\n"
            f"  NAME=WEIGHT: its share of all requests (any of {parts})"
        )
    if name == "replay":
        return "replay: the requests of a recorded trace, at their recorded times\n  FILE: what bench record wrote"
    return _recipe(name).describe()


def _split(text: str) -> tuple[str, str]:
    """Return the name and what follows it; `replay FILE` may be written with a space."""
    text = text.strip()
    if text.startswith("replay "):
        return "replay", text.removeprefix("replay ").strip()
    name, _, rest = text.partition(":")
    return name.strip(), rest.strip()


def _recipe(name: str) -> Recipe[Any]:
    """Return the shipped workload `name`. Raises UsageError."""
    from localllm.bench.workloads.registry import shipped

    recipes = shipped()
    if name not in recipes:
        raise _unknown(name)
    return recipes[name]


def _unknown(name: str) -> UsageError:
    import difflib

    close = difflib.get_close_matches(name, NAMES, 1)
    meant = f"did you mean {close[0]}? --workload {close[0]}" if close else "--workload chat"
    return UsageError(f"There is no workload {name!r}; there are {', '.join(NAMES)}.", meant)
