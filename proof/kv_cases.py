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

from localllm.bench.goldens.checking import DRIFT_NATS
from localllm.models.catalog import DEFAULT_ALIAS
from proof.kv_answers import N_TOP
from proof.kv_case_asks import Cases
from proof.kv_case_list import all_cases
from proof.kv_sides import Ours
from proof.output import MEASURED, header, model_path, tell, write_json
from proof.processes import leave_nothing_when_terminated
from proof.serving import fake_engine

KEPT = {"LOCALLLM_KV_RAM": "64MB", "LOCALLLM_KV_DISK": "1GB"}
OFF = {"LOCALLLM_KV_RAM": "off", "LOCALLLM_KV_DISK": "off"}
FAKE, DETERMINISTIC, SHIPPED = "fake engine", "deterministic", "as shipped"


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine, and how much it is asked. `is_exact`: answers must be equal to the last bit.

    `puts_back_at_once`: a prefix comes back in one step.
    """

    name: str
    arguments: Sequence[str]
    variables: Mapping[str, str]
    is_exact: bool
    n_prompt: int
    n_gen: int
    n_times: int
    n_branches: int
    puts_back_at_once: bool = False


def kinds(n_times: int) -> list[Kind]:
    """Return the engines that are asked."""
    real = ["--ctx", "2048", "--parallel", "4"]
    fake = {**fake_engine(0.5), "FAKE_NO_EOS": "1"}
    few = max(1, n_times // 5)
    return [
        Kind(FAKE, [], fake, True, 300, 12, n_times, 64),
        Kind(DETERMINISTIC, [*real, "--deterministic"], {}, True, 140, 8, few, 64, puts_back_at_once=True),
        Kind(SHIPPED, real, {}, False, 140, 8, few, 64),
    ]


def run(kind: Kind, model: Path, other: Path | None, folder: Path) -> dict[str, Any]:
    """Ask one engine all cases; return what they came to."""
    arguments = [str(model), *kind.arguments]
    kept = Ours("kept", folder / "kept", arguments, {**KEPT, **kind.variables})
    cold = Ours("cold", folder / "cold", arguments, {**OFF, **kind.variables}, {"cache": "off", "cache_prompt": False})
    beside = None
    if other is not None:  # on the same folder: its blocks are to be none of the other's
        disk = {"LOCALLLM_HOME": str(folder / "kept" / "home")}
        beside = Ours("beside", folder / "beside", [str(other), *kind.arguments], {**KEPT, **kind.variables, **disk})
    with ExitStack() as stack:
        for server in (kept, cold):
            stack.callback(server.stop)
            server.start()
        if beside is not None:
            stack.callback(beside.stop)
        amount = (kind.n_prompt, kind.n_gen, kind.n_times, kind.n_branches)
        cases = Cases(kept, cold, beside, random.Random(7), *amount, kind.is_exact, kind.puts_back_at_once)
        for name, case in all_cases(cases):
            case()
            tell(f"{kind.name}: {name}: {cases.counts[name].told()}")
    return {"engine": kind.name, "is_exact": kind.is_exact, "cases": {n: asdict(c) for n, c in cases.counts.items()}}


def is_right(found: Mapping[str, Any]) -> bool:
    """Say whether all cases of one engine came out as they must, none of them in vain; the control must find most."""
    for name, count in found["cases"].items():
        if count["failed"] or count["n"] == 0 or count["proven"] < count["owed"]:
            return False
        is_control = name.startswith("control")
        if 2 * count["right"] <= count["n"] if is_control else count["wrong"]:
            return False
    return True


def main(arguments: list[str]) -> int:
    """Run it; return 0 where all answers are right, and every case was seen to do what it is for."""
    parser = argparse.ArgumentParser(prog="python -m proof.kv_cases", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS)
    parser.add_argument("--other", type=Path, help="a second model for the same disk tier")
    parser.add_argument("--times", type=int, default=20, help="each case on the fake engine; a fifth on the model")
    parser.add_argument("--engines", nargs="+", choices=(FAKE, DETERMINISTIC, SHIPPED), help="some only, with -o")
    parser.add_argument("-o", "--output", type=Path)
    w = parser.parse_args(arguments)
    if w.engines and w.output is None:
        parser.error(f"{MEASURED.name}/kv_cases.json is of all engines: -o FILE for some")
    model = model_path(w.model)
    engines = []
    for kind in kinds(w.times):
        if w.engines and kind.name not in w.engines:
            continue
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            other = None if kind.name == FAKE else w.other
            engines.append(run(kind, model, other, Path(folder)))
    other_name = None if w.other is None else w.other.name
    head = header("kv_cases", model, times=w.times, other=other_name, n_top=N_TOP, drift_nats=DRIFT_NATS)
    write_json(w.output or MEASURED / "kv_cases.json", head | {"engines": engines})
    return 0 if all(is_right(found) for found in engines) else 1


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
