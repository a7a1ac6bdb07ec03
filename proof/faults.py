"""Ends the worker process under eight clients, again and again: `python -m proof.faults`.

Every request must end in exactly one answer, error event or refusal, and the server must answer
again by itself. The larger part runs on an engine that computes nothing, a tenth on a real model.
Writes a JSON line a fault between a line that names the machine and one that sums up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.cli.serve import WATCHDOG_VARIABLE
from localllm.models.catalog import DEFAULT_ALIAS
from proof.fault_run import KINDS, N_CLIENTS, Fault, Part, Run, drive, kinds_for
from proof.history import log_lines
from proof.output import MEASURED, header, model_path, rounded, tell, write_lines
from proof.processes import Usage, leave_nothing_when_terminated, usage
from proof.prompts import story
from proof.serving import Serving, alive, fake_engine

WATCHDOG_S = 2


def run_part(part: Part, model: Path, seed: int, first_number: int, folder: Path) -> dict[str, Any]:
    """Run one server through its faults; return its lines and what sums them up."""
    rng = random.Random(seed)
    plan = folder / "plan.json"
    variables = {"LOCALLLM_FAULTS": "1", "LOCALLLM_FAULT_PLAN": str(plan), WATCHDOG_VARIABLE: str(WATCHDOG_S)}
    arguments = [str(model), "--log-format", "json", *part.arguments]
    with Serving(folder, arguments, {**variables, **part.variables}) as serving:
        pid, workers = serving.pid, set(serving.workers())
        before = usage(pid)
        prompts = [story(rng, rng.randint(4, 30)) for _ in range(48)]
        run = Run(part, serving, rng, first_number, prompts, plan)
        asyncio.run(drive(run, kinds_for(part.n_faults, rng)))
        time.sleep(1.0)
        survived = serving.is_alive
        after = usage(pid) if survived else None
        workers |= set(serving.workers())
        exit_code = serving.stop()
    wrong = [*run.history.check(log_lines(serving.log_text())), *run.texts.mixed_up]
    return {
        "lines": [fault.line() for fault in run.faults],
        "sums": sums(run, part, before, after, wrong)
        | {"server_survived": survived, "exit_code": exit_code, "left_processes": len(alive([pid, *workers]))},
        "wrong": wrong,
    }


def sums(run: Run, part: Part, before: Usage, after: Usage | None, wrong: Sequence[str]) -> dict[str, Any]:
    """Return what one part came to."""
    summary = run.tally.summary()
    good = [fault.good_answer_ms for fault in run.faults if fault.good_answer_ms is not None]
    return {
        "engine": part.engine,
        "asked": part.n_faults,
        "injected": len(run.faults),
        "survived": len(good),
        "requests": summary.n_requests,
        "ends": dict(summary.n_by_end),
        "errors": dict(summary.n_by_error),
        "lost": len(wrong),
        "kinds": {kind: by_kind(run.faults, kind) for kind in KINDS if any(f.kind == kind for f in run.faults)},
        "fds": [before.n_fds, after.n_fds if after else None],
        "threads": [before.n_threads, after.n_threads if after else None],
        "server_rss_mb": [rounded(before.rss_bytes / 1e6), rounded(after.rss_bytes / 1e6) if after else None],
        "seconds": rounded(summary.duration_s),
    }


def by_kind(faults: Sequence[Fault], kind: str) -> dict[str, Any]:
    """Return how often one kind was survived, and in which time."""
    of_kind = [fault for fault in faults if fault.kind == kind]
    good = [fault.good_answer_ms for fault in of_kind if fault.good_answer_ms is not None]
    told = [fault.told_ms for fault in of_kind if fault.told_ms is not None]
    return {
        "injected": len(of_kind),
        "survived": len(good),
        "told_median_ms": rounded(statistics.median(told)) if told else None,
        "told_max_ms": rounded(max(told)) if told else None,
        "good_answer_median_ms": rounded(statistics.median(good)) if good else None,
        "good_answer_max_ms": rounded(max(good)) if good else None,
    }


def parts(n_faults: int, n_real: int, threads: str) -> list[Part]:
    """Return the two parts of a run of `n_faults`, `n_real` of them on a real model."""
    fake = Part("fake", n_faults - n_real, fake_engine(4.0), (4, 80), is_exact=True)
    real = Part("real", n_real, {}, (4, 24), ("--threads", threads, "--ctx", "4096"))
    return [part for part in (fake, real) if part.n_faults]


def held(part: Mapping[str, Any]) -> bool:
    """Say whether one part kept every promise."""
    survived = part["survived"] == part["asked"] and part["server_survived"]
    return survived and not part["lost"] and not part["left_processes"]


def main(arguments: list[str]) -> int:
    """Run it; return 0 where every fault was survived and no request was lost."""
    parser = argparse.ArgumentParser(prog="python -m proof.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many in all")
    parser.add_argument("--real", type=int, help="how many of them on the real model; default: a tenth")
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--threads", default="auto", help="of the real model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "faults.jsonl")
    wishes = parser.parse_args(arguments)
    n_real = wishes.faults // 10 if wishes.real is None else wishes.real
    model = model_path(wishes.model)
    head = header("faults", model, seed=wishes.seed, clients=N_CLIENTS, watchdog_s=WATCHDOG_S)
    lines: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in parts(wishes.faults, n_real, wishes.threads):
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            found = run_part(part, model, wishes.seed, len(lines) + 1, Path(folder))
        lines += found["lines"]
        results.append(found["sums"])
        for wrong in found["wrong"]:
            tell(wrong)
    write_lines(wishes.output, [head, *lines, {"summary": results}])
    tell(f"{wishes.output}")
    print(json.dumps(results, indent=1))
    is_good = all(held(part) for part in results)
    return 0 if is_good else 1


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
