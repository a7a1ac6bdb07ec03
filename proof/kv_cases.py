"""Answers that may not depend on what was cached before, over HTTP: `python -m proof.kv_cases MODEL`.

A server that keeps everything against one that keeps nothing, on an engine that computes nothing (each of its
tokens is a hash of what its cache holds) and on the model, with `--deterministic` and as shipped.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.models.catalog import DEFAULT_ALIAS
from proof.kv_case_list import Cases, all_cases
from proof.kv_sides import Ours
from proof.output import MEASURED, header, model_path, tell, write_json
from proof.processes import leave_nothing_when_terminated
from proof.serving import fake_engine

KEPT = {"LOCALLLM_KV_RAM": "64MB", "LOCALLLM_KV_DISK": "1GB"}
OFF = {"LOCALLLM_KV_RAM": "off", "LOCALLLM_KV_DISK": "off"}


FAKE = "fake engine"


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine, and how much it is asked. `is_exact`: texts must be equal, else differences are counted."""

    name: str
    arguments: Sequence[str]
    variables: Mapping[str, str]
    is_exact: bool
    n_prompt: int
    n_gen: int
    n_times: int
    n_branches: int


def kinds(n_times: int) -> list[Kind]:
    """Return the engines that are asked."""
    real = ["--ctx", "2048", "--parallel", "4", "--threads", "1"]
    fake = {**fake_engine(0.5), "FAKE_NO_EOS": "1"}
    few = max(1, n_times // 5)
    return [
        Kind(FAKE, [], fake, True, 300, 12, n_times, 64),
        Kind("deterministic", [*real, "--deterministic"], {}, True, 140, 8, few, 64),
        Kind("as shipped", real, {}, False, 140, 8, few, 16),
    ]


def run(kind: Kind, model: Path, other: Path | None, folder: Path) -> dict[str, Any]:
    """Ask one engine all cases; return what they came to."""
    arguments = [str(model), *kind.arguments]
    kept = Ours("kept", folder / "kept", arguments, {**KEPT, **kind.variables})
    cold = Ours("cold", folder / "cold", arguments, {**OFF, **kind.variables}, {"cache": "off", "cache_prompt": False})
    beside = None
    if other is not None:  # on the same folder: its blocks are to be none of the other's
        disk = {"LOCALLLM_HOME": str(folder / "kept" / "home")}
        fits = ["1024" if argument == "2048" else argument for argument in kind.arguments]
        beside = Ours("beside", folder / "beside", [str(other), *fits], {**KEPT, **kind.variables, **disk})
    with ExitStack() as stack:
        for server in (kept, cold):
            stack.callback(server.stop)
            server.start()
        if beside is not None:
            stack.callback(beside.stop)
        cases = Cases(kept, cold, beside, random.Random(7), kind.n_prompt, kind.n_gen, kind.n_times, kind.n_branches)
        for name, case in all_cases(cases):
            case()
            tell(f"{kind.name}: {name}: {cases.counts[name].told()}")
    return {"engine": kind.name, "is_exact": kind.is_exact, "cases": {n: asdict(c) for n, c in cases.counts.items()}}


def is_right(found: Mapping[str, Any]) -> bool:
    """Say whether all cases of one engine came out as they must, none of them in vain; the control must find most."""
    for name, count in found["cases"].items():
        is_control = name.startswith("control")
        n_wrong = count["failed"] + (count["other"] if found["is_exact"] and not is_control else 0)
        is_vacuous = count["n"] == 0 or (count["is_hit"] and count["cached_tokens"] == 0)
        if n_wrong or is_vacuous or (is_control and 2 * count["right"] <= count["n"]):
            return False
    return True


def main(arguments: list[str]) -> int:
    """Run it; return 0 where all answers are right."""
    parser = argparse.ArgumentParser(prog="python -m proof.kv_cases", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS)
    parser.add_argument("--other", type=Path, help="a second model for the same disk tier")
    parser.add_argument("--times", type=int, default=20, help="each case on the fake engine; a fifth on the model")
    parser.add_argument("--engines", nargs="*", help="names of engines, by default all")
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "kv_cases.json")
    w = parser.parse_args(arguments)
    model = model_path(w.model)
    engines = []
    for kind in kinds(w.times):
        if w.engines and kind.name not in w.engines:
            continue
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            other = None if kind.name == FAKE else w.other
            engines.append(run(kind, model, other, Path(folder)))
    head = header("kv_cases", model, times=w.times)
    write_json(w.output, head | {"engines": engines})
    return 0 if all(is_right(found) for found in engines) else 1


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
