"""The sections on kept KV of docs/benchmarks.md, from what `make kv-figures` measured (docs/measured/kv-*.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.reliability import ran_on, table
from docs.served import figure_row

MEASURED = Path(__file__).resolve().parent / "measured"
MARK = "<!-- what follows: make kv-figures -->"

METHOD = """Prompts of token ids, greedily, {ctx} tokens of context and 8 sequences at once on every server, the same
threads, batch sizes and KV types; `localllm serve` with `--kv-ram {ram} --kv-disk {disk}`. One run, servers in turning
order; {rounds} rounds of ours, {others} of the others. Ratios are of pairs that were taken one after the other, with a
bootstrap interval; of numbers that are no ratios the range stands there. *Reached*: the measured value, a median where
there is an interval, is what was asked. What was to be measured and was not, or did not do what it was to prove, is
missed. *Cold*: a prompt that shares nothing with any before. What never hits: three requests in a row on a server
that keeps everything and on one that keeps nothing
(`--kv-ram off --kv-disk off`, every request with `cache: off`), {pairs} pairs, each time the other one first.
Memory: a server that was started for it, with a smaller `--kv-disk`, so that both its tiers are full."""


def results(folder: Path = MEASURED) -> list[dict[str, Any]]:
    """Return what was measured, a document a model."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("kv-*.json"))]
    return [document for document in found if not document["partial"]]


def with_kept(text: str, documents: list[dict[str, Any]]) -> str:
    """Return the page `text` with its part about kept KV made anew."""
    before = text.partition(MARK)[0].rstrip()
    parts = [part for document in documents for part in section(document)]
    return "\n\n".join([before, MARK, *parts]) + "\n" if parts else before + "\n"


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of one model's section."""
    settings = found["settings"]
    yield f"## Kept: {found['model']['file']}"
    yield ran_on(found)
    yield METHOD.format(ram=settings["LOCALLLM_KV_RAM"], disk=settings["LOCALLLM_KV_DISK"], **settings)
    apart = [name for name, part in found.get("parts", {}).items() if part["date"] != found["date"]]
    if apart:
        yield "Measured anew since then: " + "; ".join(f"{name}, {_when(found['parts'][name])}" for name in apart) + "."
    head = ("figure", "asked", "measured", "95 % interval or range", "n", "")
    yield table(head, [_figure(line) for line in found["figures"]])
    names = list(dict.fromkeys(name for line in found["beside"] for name in line["sides"]))
    yield "Medians beside other servers on the same prompts:"
    yield table(("", "unit", *names), [_beside(line, names) for line in found["beside"]])
    for name, reason in found["left_out"].items():
        yield f"Left out: {name}: {reason}."


def _when(part: Mapping[str, Any]) -> str:
    git = part["git"] or {}
    return f"{part['date']}, commit {git.get('commit')}{' with changes' if git.get('dirty') else ''}"


def _figure(line: Mapping[str, Any]) -> list[Any]:
    if "missing" not in line:
        return figure_row(line)
    what, asked, _, *rest = figure_row({**line, "value": 0.0})
    return [what, asked, f"none: {line['missing']}", *rest]


def _beside(line: Mapping[str, Any], names: list[str]) -> list[Any]:
    sides = line["sides"]
    cells = [f"{sides[name]['median']:.4g} (n {sides[name]['n']})" if name in sides else None for name in names]
    return [line["what"], line["unit"], *cells]
