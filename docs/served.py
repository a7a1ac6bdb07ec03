"""The server's sections of docs/benchmarks.md, from what `make bench-serve` measured (docs/measured/serve-*.json)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.reliability import ran_on, table

MEASURED = Path(__file__).resolve().parent / "measured"
MARK = "<!-- what follows: make bench-serve -->"

METHOD = """All sides answer the same prompts of {prompt_tokens} token ids with {gen_tokens} tokens each, greedily,
end tokens ignored, with the same threads, context, batch sizes, KV types and flash attention; one after another,
each time another one first, {pairs} rounds with one client and {rounds} with four and with eight. Each prompt
begins with an id of its own, so no cache serves it. Tokens/s: all tokens over the time from the first request to
the last token, prompts included; the bare loop over the C API prefills all prompts in full batches and takes the
best logit. Ratios are of pairs, with a bootstrap interval; above 1 = `localllm serve` is faster. Client, server and
kernels share the cores."""


def results(folder: Path = MEASURED) -> list[dict[str, Any]]:
    """Return what was measured, a document a model."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("serve-*.json"))]


def with_server(text: str, documents: list[dict[str, Any]]) -> str:
    """Return the page `text` with its part about the server made anew."""
    engine = text.partition(MARK)[0].rstrip()
    parts = [part for document in documents for part in section(document)]
    return "\n\n".join([engine, MARK, *parts]) + "\n" if parts else engine + "\n"


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of one model's section."""
    yield f"## Served: {found['model']['file']}"
    yield ran_on(found)
    yield METHOD.format(**found["settings"])
    yield table(
        ("figure", "asked", "measured", "95 % interval or range", "n", ""), [figure_row(f) for f in found["figures"]]
    )
    for n_at_once, burst in found["bursts"].items():
        yield f"{n_at_once} at once:"
        names = (
            "side",
            "tokens/s in all",
            "tokens/s each, after the first",
            "first token, ms",
            "speed of ours",
            "pace of ours",
        )
        yield table(names, [_side(line) for line in burst["table"]])
    for name, reason in found["left_out"].items():
        yield f"Left out: {name}: {reason}."
    stop = found["stop"]
    ends = ", ".join(stop["ends"])
    yield f"Stop under 8 streams: {ends}; new work: {stop['new_work']}; exit code {stop['exit_code']}."


def figure_row(line: Mapping[str, Any]) -> list[Any]:
    """Return a figure as a row of a table: what is asked, what was measured, whether that is reached."""
    sign = ">=" if line["at_least"] else "<="
    spread = "" if line["low"] is None else f"{line['low']:.3g} to {line['high']:.3g}"
    reached = "reached" if line["reached"] else "missed"
    unit = f" {line['unit']}" if line["unit"] else ""
    return [line["what"], f"{sign} {line['asked']:.4g}{unit}", f"{line['value']:.3g}", spread, line["n"], reached]


def _side(line: Mapping[str, Any]) -> list[Any]:
    ratios = [_ratio(line["speed_ratio"]), _ratio(line["decode_ratio"])]
    return [line["side"], line["tokens_per_s"], line["decode_tokens_per_s_each"], line["ttft_ms"], *ratios]


def _ratio(found: list[float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
