"""What kept KV saves and costs, in pairs in one run: `python -m proof.kv_figures MODEL`.

Ours with its tiers against cold prompts, against ours without tiers, and beside other servers where they were
built (`--peers DIR`): the same prompts of token ids, greedily, one server after another.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import compose
from localllm.bench.serving.servers.listening import free_port
from localllm.errors import LocalLLMError, UsageError
from localllm.models.catalog import DEFAULT_ALIAS
from localllm.runtime.config import LoadConfig
from proof import kv_measures, kv_restore, kv_streams
from proof.kv_measures import Rounds
from proof.kv_parts import Experiment, Part, told
from proof.kv_sides import Other, Ours, Server, TokenPrompts
from proof.output import MEASURED, header, model_path, run_measured, tell
from proof.peers import Wanted, llama_server, python_server
from proof.processes import leave_nothing_when_terminated
from proof.prompts import stories

CTX, N_PARALLEL = 16384, 8
RAM_BYTES = 10**9
OFF = {"LOCALLLM_KV_RAM": "off", "LOCALLLM_KV_DISK": "off"}
KEPT = {"LOCALLLM_KV_RAM": "1GB", "LOCALLLM_KV_DISK": "4GB"}
FILLED_DISK, FILLED_DISK_BYTES = "500MB", 500 * 10**6
NOTHING_KEPT = {"cache": "off", "cache_prompt": False}
NAMES = ("never", "shared", "hits", "restarts", "chat", "speed", "room", "restored", "written", "fill", "pool")
"""The parts, in their order: first what asks for servers that nobody asked anything yet."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds of ours, of the others, pairs of what is compared finely, prompts of the fill."""

    model: Path
    n_rounds: int
    n_others: int
    n_pairs: int
    n_fill: int
    peers: Path | None
    only: frozenset[str]

    @property
    def flags(self) -> list[str]:
        """What servers of ours are started with."""
        return [str(self.model), "--ctx", str(CTX), "--parallel", str(N_PARALLEL)]


def servers(plan: Plan, folder: Path, stack: ExitStack) -> tuple[Ours, Ours, list[Server], dict[str, str], int]:
    """Start ours with and without tiers, and the others; return who was left out, and the vocabulary's size too."""
    environment = dict(os.environ)
    with compose.open(plan.model, LoadConfig(ctx=CTX, parallel=N_PARALLEL)) as service:
        settings, n_vocab = dict(service.model.settings), service.spec.n_vocab
        never = {str(token): -100.0 for token in sorted(service.tokenizer.vocabulary.eog_ids)}
    kept = Ours("localllm serve", folder / "kept", plan.flags, KEPT)
    off = Ours("without tiers", folder / "off", plan.flags, OFF, NOTHING_KEPT)
    wanted = Wanted(plan.model, N_PARALLEL, settings, environment)
    port, other_port, config = free_port(), free_port(), folder / "python-server.json"
    peers = [
        Other(llama_server(plan.peers, wanted, port), wanted, {"ignore_eos": True}, port),
        Other(python_server(plan.peers, wanted, other_port, config), wanted, {"logit_bias": never}, other_port),
    ]
    left_out: dict[str, str] = {}
    others: list[Server] = []
    for server in (kept, off):
        stack.callback(server.stop)
        server.start()
    for other in peers:
        if other.peer.left_out:
            left_out[other.name] = other.peer.left_out
            continue
        stack.callback(other.stop)
        try:
            other.start()
        except LocalLLMError as error:
            left_out[other.name] = str(error)
        else:
            others.append(other)
    return kept, off, others, left_out, n_vocab


def experiments(plan: Plan, folder: Path, rounds: Rounds, off: Ours) -> Iterator[Experiment]:
    """Yield the experiments, by NAMES, those in which other servers take part before those servers are stopped."""
    kept, draw, n, m, s = rounds.ours, rounds.prompts, plan.n_rounds, kv_measures, kv_streams
    new = [s.never_asked("new server")]
    yield Experiment("never", new, lambda: s.never_hits(kept, off, draw, plan.n_pairs, "new server"))
    once = [m.SHARED_TTFT, m.SHARED_ONCE]
    yield Experiment("shared", once, lambda: m.shared_at_once(rounds, n, plan.n_others))
    yield Experiment("hits", [m.HIT_TTFT], lambda: m.hits(rounds, n, plan.n_others))
    again = [m.RESTART_TTFT, m.RESTART_DISK, m.AGAIN_TTFT]
    yield Experiment("restarts", again, lambda: m.restarts(rounds, 2, 1, max(1, n // 2)))
    yield Experiment("chat", [m.CHAT_MORE], lambda: m.growing_chat(rounds, stories(3, 14)))
    for other in rounds.others:  # what follows is between ours
        other.stop()
    speed = folder / "speed"
    long = draw.fresh(kv_restore.N_TOKENS)
    yield Experiment("speed", [kv_restore.SPEED], lambda: kv_restore.restore_speed(plan.model, speed, long, 8))
    # It gives its figure, or says that there is too little free disk for it.
    yield Experiment("room", [], lambda: kv_restore.default_room(plan.model, folder))
    n_restored, n_written = max(3, plan.n_pairs // 2), max(2, plan.n_pairs // 3)
    yield Experiment("restored", [s.RESTORED_P95], lambda: s.restored_beside(kept, draw, n_restored))
    beside = [s.WRITTEN_MEAN, s.WRITTEN_P95]
    yield Experiment("written", beside, lambda: s.written_beside(kept, off, draw, n_written))
    ram, disk = s.fill_asked(plan.n_fill, FILLED_DISK)
    full = [ram, s.never_asked(_when_full(plan)), disk]
    yield Experiment("fill", full, lambda: filled(plan, folder, draw, off))
    yield Experiment("pool", [s.POOL_USE], lambda: pool(plan, folder, draw))


def _when_full(plan: Plan) -> str:
    return f"after {plan.n_fill} distinct prompts of {kv_streams.FILL_TOKENS} tokens"


def filled(plan: Plan, folder: Path, draw: TokenPrompts, off: Ours) -> Part:
    """Fill a server that was started for it, whose disk tier is too small for what its RAM tier holds."""
    disk = {"LOCALLLM_KV_DISK": FILLED_DISK}
    server = Ours("filled", folder / "filled", plan.flags, KEPT | disk)
    ram_asked, disk_asked = kv_streams.fill_asked(plan.n_fill, FILLED_DISK)
    try:
        server.start()
        part = kv_streams.fill(server, draw, plan.n_fill, RAM_BYTES, ram_asked)
        part += kv_streams.never_hits(server, off, draw, plan.n_pairs, _when_full(plan))
        return part + kv_streams.left_on_disk(server, FILLED_DISK_BYTES, disk_asked)
    finally:
        server.stop()


def pool(plan: Plan, folder: Path, draw: TokenPrompts) -> Part:
    """Measure a server whose pool is too small for what it is asked."""
    small = Ours("small pool", folder / "pool", [str(plan.model), "--ctx", str(kv_streams.POOL_CTX), "--parallel", "8"])
    try:
        small.start()
        return kv_streams.pool_use(small, draw)
    finally:
        small.stop()


def measure(plan: Plan, folder: Path, head: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Measure in order; what was measured when it is interrupted stays in `found`, each line with its part's name."""
    with ExitStack() as stack:
        kept, off, others, left_out, n_vocab = servers(plan, folder, stack)
        for name, reason in left_out.items():
            tell(f"left out: {name}: {reason}")
        draw = TokenPrompts.of(kept.side.target, n_vocab, seed=17)
        rounds = Rounds(kept, others, draw, left_out)
        found |= {"left_out": left_out, "figures": [], "beside": [], "facts": {}, "parts": {}}
        for one in experiments(plan, folder, rounds, off):
            if plan.only and one.name not in plan.only:
                continue
            tell(one.name)
            part = one.run()
            lines = one.figures(part)
            told(lines)
            found["figures"] += [{"part": one.name, **line} for line in lines]
            found["beside"] += [{"part": one.name, **beside.line()} for beside in part.beside]
            found["facts"][one.name] = dict(part.facts)
            found["parts"][one.name] = {"date": head["date"], "git": head["git"]}


def mergeable(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole run at `path`, of which parts are measured anew. Raises UsageError where it is of another kind.

    The model, the machine and the settings must be the same.
    """
    hint = "-o FILE, for these parts alone"
    if not path.exists():
        raise UsageError(f"There is no whole run in {path.name} of which parts could be measured anew.", hint)
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name in ("model", "machine_line", "settings"):
        if before.get(name) != head[name]:
            raise UsageError(f"{path.name} was measured with another {name.partition('_')[0]}.", hint)
    if set(before.get("parts", ())) != set(NAMES):
        raise UsageError(f"{path.name} does not hold all parts by name.", hint)
    return before


def merge(before: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Complete what was found with the parts of `before` that were not measured anew."""
    for name in ("figures", "beside"):
        kept = [line for line in before[name] if line["part"] not in found["parts"]]
        found[name] = sorted([*kept, *found[name]], key=lambda line: NAMES.index(line["part"]))
    for name in ("left_out", "facts", "parts"):
        found[name] = {**before[name], **found[name]}


def main(arguments: list[str]) -> int:
    """Run it; return 0 where every figure that is owed is there and reached."""
    parser = argparse.ArgumentParser(prog="python -m proof.kv_figures", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS)
    parser.add_argument("--peers", type=Path, help="the folder that peers.sh made")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of ours")
    parser.add_argument("--others", type=int, default=1, help="rounds in which other servers take part")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of what is compared finely")
    parser.add_argument("--fill", type=int, default=100, help="distinct prompts")
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=[], help="these replace those of the last whole run"
    )
    parser.add_argument("-o", "--output", type=Path, help="--only: these parts alone into a file of their own")
    w = parser.parse_args(arguments)
    model = model_path(w.model)
    plan = Plan(model, w.rounds, w.others, w.pairs, w.fill, w.peers, frozenset(w.only))
    settings = {"rounds": w.rounds, "others": w.others, "pairs": w.pairs, "fill": w.fill, "ctx": CTX}
    head = header("kv", model, parallel=N_PARALLEL, **settings, **KEPT)
    output = w.output or MEASURED / f"kv-{model.stem.lower()}.json"
    try:
        before = mergeable(output, head) if plan.only and w.output is None else None
    except UsageError as error:
        parser.error(f"{error.message} {error.hint}")

    def measured(folder: Path, found: dict[str, Any]) -> None:
        measure(plan, folder, head, found)
        if before is not None:
            merge(before, found)

    whole = head if before is None else {name: before[name] for name in head}
    return run_measured(output, whole, measured)


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
