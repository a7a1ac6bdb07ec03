"""Sixteen clients for ten minutes, some of whom go away in the middle: `python -m proof.load_run`.

Counts what went wrong other than 429, 503 and 499, and watches what the processes hold: memory
by minute, descriptors and threads before and after.
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.load import closed_loop
from localllm.models.catalog import DEFAULT_ALIAS
from localllm.server.record import CLIENT_GONE
from proof.history import History, log_lines
from proof.output import MEASURED, header, model_path, rounded, tell, write_json
from proof.processes import Usage, leave_nothing_when_terminated, usage
from proof.prompts import story
from proof.serving import Serving, alive, fake_engine
from proof.tally import Tally

N_CLIENTS = 16
PARTS = 10
"""The run is cut into so many equal parts ("minutes" of a run of ten); memory counts from the end of the third on."""
SETTLE_S = 3.0
ALLOWED_STATUS = (429, 503, CLIENT_GONE)


@dataclass(slots=True)
class Requests:
    """Makes each client's requests: 45 % streams, 30 % whole answers, 25 % that are cancelled at some point."""

    seed: int
    history: History
    prefix: str = "load"
    counts: Counter[str] = field(default_factory=Counter)

    def of(self, client: int) -> Iterator[Call]:
        """Yield one client's requests, without end."""
        rng = random.Random(self.seed * 1000 + client)
        number = 0
        while True:
            name = f"{self.prefix}-{client}-{number}"
            number += 1
            kind = rng.choices(("stream", "whole", "cancel"), (45, 30, 25))[0]
            self.counts[kind] += 1
            self.history.began(name)
            yield self._call(rng, name, kind)

    @staticmethod
    def _call(rng: random.Random, name: str, kind: str) -> Call:
        is_stream = kind == "stream" or (kind == "cancel" and rng.random() < 0.7)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": story(rng, rng.randint(5, 120))}],
            "max_tokens": rng.randint(8, 48),
            "stream": is_stream,
        }
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        cancel: dict[str, Any] = {}
        if kind == "cancel" and is_stream and rng.random() < 0.5:
            cancel = {"cancel_after_events": rng.randint(1, 12)}
        elif kind == "cancel":
            cancel = {"cancel_after_s": rng.uniform(0.0, 3.0)}
        return Call.of("/v1/chat/completions", body, label=name, headers=(("x-request-id", name),), **cancel)


@dataclass(slots=True)
class Watch:
    """Samples what the server and its worker hold, once a second."""

    pids: Mapping[str, int]
    samples: list[tuple[float, dict[str, Usage]]] = field(default_factory=list)

    async def run(self, duration_s: float) -> None:
        """Sample until `duration_s` have passed."""
        began_s = time.perf_counter()
        while (at_s := time.perf_counter() - began_s) < duration_s:
            self.samples.append((at_s, self.now()))
            await asyncio.sleep(min(1.0, duration_s / PARTS / 4))

    def now(self) -> dict[str, Usage]:
        """Return what each process holds."""
        return {name: usage(pid) for name, pid in self.pids.items()}

    def by_part(self, name: str, duration_s: float) -> list[dict[str, float | None]]:
        """Return the medians of each part of the run: resident memory, and that of no file, in MB."""
        found = []
        for part in range(PARTS):
            begin_s, end_s = duration_s * part / PARTS, duration_s * (part + 1) / PARTS
            within = [sample[name] for at_s, sample in self.samples if begin_s <= at_s < end_s]
            if within:
                found.append(
                    {
                        "rss_mb": _mb([one.rss_bytes for one in within]),
                        "anonymous_mb": _mb([one.anonymous_bytes for one in within]),
                    }
                )
        return found


def _mb(values: Sequence[int]) -> float | None:
    return rounded(statistics.median(values) / 1e6, 2)


def growth_mb(parts: Sequence[Mapping[str, float | None]], field_name: str = "rss_mb") -> float | None:
    """Return the growth from the third part to the last, in MB; None for a run too short to tell."""
    if len(parts) < PARTS:
        return None
    first, last = parts[2][field_name], parts[-1][field_name]
    return None if first is None or last is None else round(last - first, 2)


def bad(outcome: Outcome) -> str | None:
    """Return what is wrong with an outcome, None for what may happen under load."""
    if outcome.end in (End.ANSWER, End.CANCELLED):
        return None
    if outcome.end is End.REFUSED and outcome.status in ALLOWED_STATUS:
        return None
    return f"{outcome.end.value} {outcome.status} {outcome.error_code or ''} {outcome.fault}".strip()


def warm(serving: Serving) -> None:
    """Let every path run once, so that what is loaded late is not taken for growth."""
    requests = Requests(7, History(), "warm")
    clients = [[next(requests.of(client))] for client in range(N_CLIENTS)]
    asyncio.run(closed_loop(serving.target(timeout_s=120.0), clients, lambda outcome: None))
    time.sleep(SETTLE_S)


def run(serving: Serving, duration_s: float, seed: int) -> dict[str, Any]:
    """Load the server for `duration_s`; return what it came to."""
    workers = serving.workers()
    watch = Watch({"server": serving.pid, "worker": workers[-1]})
    history, tally, errors = History(), Tally(), Counter[str]()
    requests = Requests(seed, history)

    def keep(outcome: Outcome) -> None:
        history.keep(outcome)
        tally.add(outcome)
        if (wrong := bad(outcome)) is not None:
            errors[wrong] += 1

    async def both() -> None:
        target = serving.target(timeout_s=300.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(duration_s))
            clients = [requests.of(number) for number in range(N_CLIENTS)]
            group.create_task(closed_loop(target, clients, keep, duration_s=duration_s))

    warm(serving)
    before = watch.now()
    asyncio.run(both())
    time.sleep(SETTLE_S)
    after = watch.now()
    restarted = serving.workers() != workers
    serving.stop()
    wrong = history.check(log_lines(serving.log_text()))
    parts = {name: watch.by_part(name, duration_s) for name in watch.pids}
    summary = tally.summary()
    return {
        "duration_s": rounded(duration_s),
        "requests": summary.n_requests,
        "kinds": dict(requests.counts),
        "ends": dict(summary.n_by_end),
        "refusals": dict(summary.n_by_error),
        "bad": dict(errors),
        "history": wrong[:50],
        "n_history": len(wrong),
        "worker_restarted": restarted,
        "left_processes": len(alive([serving.pid, *workers])),
        "output_tokens_per_s": rounded(summary.output_tokens_per_s),
        "ttft_ms": _distribution(summary.latencies.get("ttft")),
        "itl_ms": _distribution(summary.latencies.get("itl")),
        "memory_by_part": parts,
        "growth_mb": {name: growth_mb(found) for name, found in parts.items()},
        "anonymous_growth_mb": {name: growth_mb(found, "anonymous_mb") for name, found in parts.items()},
        "fds": {name: [before[name].n_fds, after[name].n_fds] for name in watch.pids},
        "threads": {name: [before[name].n_threads, after[name].n_threads] for name in watch.pids},
    }


def _distribution(found: Any) -> dict[str, float] | None:
    return None if found is None else {name: round(value, 2) for name, value in asdict(found).items()}


def main(arguments: list[str]) -> int:
    """Run it; return 0 where nothing went wrong, memory stood still and nothing is left."""
    parser = argparse.ArgumentParser(prog="python -m proof.load_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--fake", action="store_true", help="on an engine that computes nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "load.json")
    wishes = parser.parse_args(arguments)
    model = model_path(wishes.model)
    head = header("load", model, seed=wishes.seed, clients=N_CLIENTS, fake=wishes.fake, threads=wishes.threads)
    serve = [str(model), "--log-format", "json", "--threads", wishes.threads]
    with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
        with Serving(Path(folder), serve, fake_engine(3.0) if wishes.fake else {}) as serving:
            found = run(serving, 60 * wishes.minutes, wishes.seed)
    write_json(wishes.output, head | found)
    tell(f"{wishes.output}")
    print(json.dumps(found, indent=1))
    grew = [value for value in found["growth_mb"].values() if value is not None and value >= 2.0]
    wrong = found["bad"] or found["n_history"] or found["left_processes"] or found["worker_restarted"]
    return 1 if grew or wrong else 0


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
