"""The figures of the server, taken in pairs in one run: `python -m proof.serve_figures MODEL`.

Ours against the same engine in this process, against a bare batched loop over the C API, and
against other servers where they were built (`--peers DIR`): the same prompts, the same settings,
one after another, each time another one first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from localllm import compose
from localllm.backends.llamacpp.bare import BareLoop
from localllm.bench.serving.servers.listening import free_port
from localllm.errors import LocalLLMError
from localllm.models.catalog import DEFAULT_ALIAS
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.service import Service
from proof import crowds
from proof.figures import BARE, ENGINE, OURS, Figure, Turns, burst_figures, samples, table
from proof.output import MEASURED, header, model_path, run_measured, tell
from proof.peers import Peer, Wanted, llama_server, python_server, running
from proof.processes import leave_nothing_when_terminated
from proof.prompts import token_prompts
from proof.serving import Serving
from proof.sides import BareSeconds, BareSide, EngineSide, HttpSide, Prompts, Side

N_PARALLEL, N_RETAINED = 8, 4
DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    model: Path
    threads: int | None
    ctx: int
    n_prompt: int
    n_gen: int
    n_pairs: int
    n_rounds: int
    n_newcomers: int
    idle_s: float
    peers: Path | None
    environment: Mapping[str, str]

    @property
    def config(self) -> LoadConfig:
        """The settings of every side that is ours."""
        return LoadConfig(ctx=self.ctx, threads=self.threads, parallel=N_PARALLEL, retained=N_RETAINED)


def bare_seconds(loop: BareLoop, prompts: Prompts, n_steps: int) -> BareSeconds:
    """Run the bare loop."""
    took = loop.run(prompts, n_steps)
    return BareSeconds(took.prefill_s, took.decode_s)


@contextlib.contextmanager
def opened(plan: Plan, folder: Path) -> Iterator[tuple[Serving, Service, list[Side], dict[str, str]]]:
    """Start everything that is compared; yield ours, the engine in process, all sides, and who was left out."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(compose.open(plan.model, plan.config))
        bare = compose.open_bare(plan.model, plan.config)
        stack.callback(bare.close)
        settings = service.model.settings
        flags = ["--ctx", plan.ctx, "--threads", settings["n_threads"], "--parallel", N_PARALLEL]
        serve = [str(plan.model), *map(str, flags), "--drain-timeout", str(DRAIN_TIMEOUT_S)]
        serving = stack.enter_context(Serving(folder / "ours", serve))
        ours = HttpSide(OURS, serving.target(), {"ignore_eos": True}, serving.pid)
        sides: list[Side] = [ours, EngineSide(ENGINE, service), BareSide(BARE, partial(bare_seconds, bare))]
        left_out = {}
        wanted = Wanted(plan.model, N_PARALLEL, settings, plan.environment)
        for peer, port, fields in peers(plan, wanted, service, folder):
            if peer.left_out:
                left_out[peer.name] = peer.left_out
                continue
            try:
                target = stack.enter_context(running(peer, wanted, port))
            except LocalLLMError as error:
                left_out[peer.name] = str(error)
            else:
                sides.append(HttpSide(peer.name, target, fields))
        yield serving, service, sides, left_out


def peers(plan: Plan, wanted: Wanted, service: Service, folder: Path) -> Iterator[tuple[Peer, int, Mapping[str, Any]]]:
    """Yield the other servers, each with its port and what its requests need to go on past the end token."""
    port = free_port()
    yield llama_server(plan.peers, wanted, port), port, {"ignore_eos": True}
    port = free_port()
    never = {str(token): -100.0 for token in sorted(service.tokenizer.vocabulary.eog_ids)}
    yield python_server(plan.peers, wanted, port, folder / "python-server.json"), port, {"logit_bias": never}


def drawer(service: Service, n_tokens: int) -> Callable[[int], Prompts]:
    """Return a source of prompts that nobody saw yet."""
    encode = partial(service.tokenizer.encode, parse_special=False)
    source = token_prompts(encode, service.spec.n_vocab, seed=11, n_tokens=n_tokens)
    return lambda n: list(itertools.islice(source, n))


def measure(plan: Plan, folder: Path, found: dict[str, Any]) -> None:
    """Measure everything in order; what was measured when it is interrupted stays in `found`."""
    with opened(plan, folder) as (serving, service, sides, left_out):
        for name, reason in left_out.items():
            tell(f"left out: {name}: {reason}")
        draw = drawer(service, plan.n_prompt)
        ours = sides[0]
        assert isinstance(ours, HttpSide)
        figures: list[dict[str, Any]] = []
        found |= {"parameters": dict(service.model.settings), "left_out": left_out, "figures": figures, "bursts": {}}
        turns = Turns(sides, draw, left_out)
        for n_at_once, n_rounds in ((1, plan.n_pairs), (4, plan.n_rounds), (8, plan.n_rounds)):
            tell(f"{n_at_once} at once, {n_rounds} rounds")
            rounds = turns.take(n_at_once, plan.n_gen, n_rounds)
            figures += lines(burst_figures(rounds, n_at_once))
            found["bursts"][str(n_at_once)] = {"table": table(rounds), "rounds": samples(rounds)}
        if plan.n_newcomers:
            tell("newcomers")
            idle_ms = crowds.idle_ttft_ms(ours, draw, max(3, plan.n_newcomers))
            found["idle_ttft_ms"] = round(idle_ms, 2)
            itl_s = RuntimeConfig().itl_target_s
            figures += lines([crowds.newcomers(ours, draw, plan.n_newcomers, idle_ms, itl_s)])
            figures += lines([crowds.against_many(ours, draw, plan.n_newcomers, idle_ms, itl_s)])
        tell(f"idle, {plan.idle_s:.0f} s")
        figures += lines(crowds.idle_figures(serving, plan.idle_s))
        tell("stop")
        of_stop, found["stop"] = crowds.stop_figures(serving, ours, draw, DRAIN_TIMEOUT_S)
        figures += lines(of_stop)


def lines(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return figures as they stand in the result; tells them too."""
    for figure in figures:
        tell(f"  {'reached' if figure.reached else 'missed '} {figure.value:8.3f} {figure.unit:2s} {figure.what}")
    return [figure.line() for figure in figures]


def main(arguments: list[str]) -> int:
    """Run it; return 0 where every figure is reached."""
    parser = argparse.ArgumentParser(prog="python -m proof.serve_figures", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_ALIAS)
    parser.add_argument("--peers", type=Path, help="the folder that peers.sh made")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--gen", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--pairs", type=int, default=16, help="rounds with one client")
    parser.add_argument("--rounds", type=int, default=8, help="rounds with four and with eight")
    parser.add_argument("--newcomers", type=int, default=5)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    parser.add_argument("-o", "--output", type=Path)
    w = parser.parse_args(arguments)
    environment = dict(os.environ)
    model = model_path(w.model)
    plan = Plan(model, w.threads, w.ctx, w.prompt, w.gen, w.pairs, w.rounds, w.newcomers, w.idle, w.peers, environment)
    settings = {"prompt_tokens": w.prompt, "gen_tokens": w.gen, "pairs": w.pairs, "rounds": w.rounds}
    head = header("serve", model, parallel=N_PARALLEL, retained=N_RETAINED, ctx=w.ctx, **settings)
    output = w.output or MEASURED / f"serve-{model.stem.lower()}.json"
    return run_measured(output, head, lambda folder, found: measure(plan, folder, found))


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
