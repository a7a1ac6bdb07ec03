"""What kept KV saves and costs, in pairs in one run: `python -m proof.kv_figures MODEL`.

Ours with its tiers against cold prompts, against ours without tiers, and beside other servers where they were
built (`--peers DIR`): the same prompts of token ids, greedily, one server after another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import compose
from localllm.bench.serving.servers.listening import free_port
from localllm.errors import LocalLLMError
from localllm.models.catalog import DEFAULT_ALIAS
from localllm.runtime.config import LoadConfig
from proof import kv_measures, kv_restore, kv_streams
from proof.kv_measures import Part, Rounds, told
from proof.kv_sides import Other, Ours, Server, TokenPrompts
from proof.output import MEASURED, header, model_path, run_measured, tell
from proof.peers import Wanted, llama_server, python_server
from proof.processes import leave_nothing_when_terminated
from proof.prompts import stories

CTX, N_PARALLEL = 16384, 8
RAM_BYTES, DISK_BYTES = 10**9, 4 * 10**9
OFF = {"LOCALLLM_KV_RAM": "off", "LOCALLLM_KV_DISK": "off"}
KEPT = {"LOCALLLM_KV_RAM": "1GB", "LOCALLLM_KV_DISK": "4GB"}
NOTHING_KEPT = {"cache": "off", "cache_prompt": False}


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


def servers(plan: Plan, folder: Path, stack: ExitStack) -> tuple[Ours, Ours, list[Server], dict[str, str], int]:
    """Start ours with and without tiers, and the others; return who was left out, and the vocabulary's size too."""
    environment = dict(os.environ)
    with compose.open(plan.model, LoadConfig(ctx=CTX, parallel=N_PARALLEL)) as service:
        settings, n_vocab = dict(service.model.settings), service.spec.n_vocab
        never = {str(token): -100.0 for token in sorted(service.tokenizer.vocabulary.eog_ids)}
    flags = [str(plan.model), "--ctx", str(CTX), "--parallel", str(N_PARALLEL)]
    kept = Ours("localllm serve", folder / "kept", flags, KEPT)
    off = Ours("without tiers", folder / "off", flags, OFF, NOTHING_KEPT)
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


def parts(plan: Plan, folder: Path, rounds: Rounds, off: Ours) -> Iterator[tuple[str, Callable[[], Part]]]:
    """Yield the experiments in their order: first those that others take part in, last those that fill the tiers."""
    kept, draw, n = rounds.ours, rounds.prompts, plan.n_rounds
    yield "shared", lambda: kv_measures.shared_at_once(rounds, n, plan.n_others)
    yield "hits", lambda: kv_measures.hits(rounds, n, plan.n_others)
    yield "restarts", lambda: kv_measures.restarts(rounds, 2, 1, max(1, n // 2))
    yield "chat", lambda: kv_measures.growing_chat(rounds, stories(3, 14))
    yield "end of others", lambda: ended(rounds)
    yield "speed", lambda: kv_restore.restore_speed(plan.model, folder / "speed", draw.fresh(kv_restore.N_TOKENS), 8)
    yield "room", lambda: kv_restore.default_room(plan.model, folder)
    yield "never", lambda: kv_streams.never_hits(kept, off, draw, plan.n_pairs, "new server")
    yield "restored", lambda: kv_streams.restored_beside(kept, draw, max(3, plan.n_pairs // 2))
    yield "written", lambda: kv_streams.written_beside(kept, off, draw, max(2, plan.n_pairs // 3))
    if plan.n_fill:
        full = f"after {plan.n_fill} distinct prompts of {kv_streams.FILL_TOKENS} tokens"
        yield "fill", lambda: kv_streams.fill(kept, draw, plan.n_fill, RAM_BYTES)
        yield "fill", lambda: kv_streams.never_hits(kept, off, draw, plan.n_pairs, full)
    yield "pool", lambda: pool(plan, folder, draw)


def ended(rounds: Rounds) -> Part:
    """Stop the other servers: what follows is between ours."""
    for other in rounds.others:
        other.stop()
    return Part()


def pool(plan: Plan, folder: Path, draw: TokenPrompts) -> Part:
    """Measure a server whose pool is too small for what it is asked."""
    small = Ours("small pool", folder / "pool", [str(plan.model), "--ctx", str(kv_streams.POOL_CTX), "--parallel", "8"])
    try:
        small.start()
        return kv_streams.pool_use(small, draw)
    finally:
        small.stop()


def measure(plan: Plan, folder: Path, found: dict[str, Any]) -> None:
    """Measure everything in order; what was measured when it is interrupted stays in `found`."""
    with ExitStack() as stack:
        kept, off, others, left_out, n_vocab = servers(plan, folder, stack)
        for name, reason in left_out.items():
            tell(f"left out: {name}: {reason}")
        draw = TokenPrompts.of(kept.side.target, n_vocab, seed=17)
        rounds = Rounds(kept, others, draw, left_out)
        found |= {"left_out": left_out, "figures": [], "beside": [], "facts": {}}
        for name, part in parts(plan, folder, rounds, off):
            if plan.only and name not in plan.only:
                continue
            tell(name)
            taken = told(part())
            found["figures"] += [figure.line() for figure in taken.figures]
            found["beside"] += [beside.line() for beside in taken.beside]
            found["facts"] |= taken.facts


def main(arguments: list[str]) -> int:
    """Run it; return 0 where every figure is reached."""
    parser = argparse.ArgumentParser(prog="python -m proof.kv_figures", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS)
    parser.add_argument("--peers", type=Path, help="the folder that peers.sh made")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of ours")
    parser.add_argument("--others", type=int, default=1, help="rounds in which other servers take part")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of what is compared finely")
    parser.add_argument("--fill", type=int, default=100, help="distinct prompts; 0: none")
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
    parser.add_argument("-o", "--output", type=Path)
    w = parser.parse_args(arguments)
    model = model_path(w.model)
    plan = Plan(model, w.rounds, w.others, w.pairs, w.fill, w.peers, frozenset(w.only))
    settings = {"rounds": w.rounds, "others": w.others, "pairs": w.pairs, "fill": w.fill, "ctx": CTX}
    head = header("kv", model, parallel=N_PARALLEL, **settings, **KEPT)
    output = w.output or MEASURED / f"kv-{model.stem.lower()}.json"
    return run_measured(output, head, lambda folder, found: measure(plan, folder, found))


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
