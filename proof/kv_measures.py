"""What a known prefix saves: the same scripts of prompts on every server, one after another in turning order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.latencies import ttft_ms
from localllm.bench.client.load import closed_loop
from localllm.bench.stats.summaries import estimate, median, paired_ratio
from proof.kv_parts import Asked, Beside, Part
from proof.kv_sides import Ours, Server, TokenPrompts
from proof.sides import BurstFailed, HttpSide, Prompts, burst_of

SYSTEM_TOKENS, OWN_TOKENS, N_CLIENTS, N_GEN = 1500, 20, 8, 4
DOCUMENT_TOKENS, QUESTION_TOKENS = 2000, 100
N_TURNS, TURN_TOKENS = 20, 32
SETTLE_S = 0.6
"""What a server does after an answer, exporting for one, is not to fall on the next one's time."""

_AT_ONCE = f"{N_CLIENTS} clients at once, one {SYSTEM_TOKENS}-token system prompt"
_ONE = f"a {SYSTEM_TOKENS}-token prompt with {OWN_TOKENS} tokens of its own"
_HIT = f"{DOCUMENT_TOKENS} shared tokens and {QUESTION_TOKENS} own"
_CHAT = f"a chat of {N_TURNS} turns"
SHARED_TTFT = Asked(f"{_AT_ONCE}: median first token over one client's alone", 1.25)
SHARED_ONCE = Asked(f"{_AT_ONCE}: tokens computed beyond the prefix once and what is each one's own", 0)
RESTART_TTFT = Asked(f"{_ONE}, after a restart: first token over cold", 0.03)
RESTART_DISK = Asked("after a restart: tokens of that prompt from disk", SYSTEM_TOKENS, at_least=True)
AGAIN_TTFT = Asked("the same prompt again, through HTTP: first token", 50.0, unit="ms")
HIT_TTFT = Asked(f"{_HIT}: a hit's first token over cold", 1 / 15)
CHAT_MORE = Asked(f"{_CHAT}: most tokens computed in a turn beyond its new ones", 1)

T = TypeVar("T")


@dataclass(slots=True)
class Rounds:
    """All servers in turn, and what each gave. `left_out`: who failed, and why. Ours is the first and must not fail."""

    ours: Ours
    others: list[Server]
    prompts: TokenPrompts
    left_out: dict[str, str] = field(default_factory=dict)

    def take(self, n_rounds: int, n_others: int, one: Callable[[Server, int], T]) -> dict[str, list[T]]:
        """Return what `one` gave of each server, round by round; others take part in the first `n_others`."""
        found: dict[str, list[T]] = {}
        for at in range(n_rounds):
            servers = [self.ours, *(self.others if at < n_others else ())]
            first = at % len(servers)
            for server in [*servers[first:], *servers[:first]]:
                if server.name in self.left_out:
                    continue
                try:
                    taken = one(server, at)
                except BurstFailed as error:
                    if server is self.ours:
                        raise
                    self.left_out[server.name] = str(error)
                else:
                    found.setdefault(server.name, []).append(taken)
                time.sleep(SETTLE_S)
        return found


def ask(side: HttpSide, prompts: Prompts, n_gen: int = N_GEN) -> list[Outcome]:
    """Send all prompts at once and return the whole answers, in their order. Raises BurstFailed."""
    outcomes: list[Outcome] = []
    asyncio.run(closed_loop(side.target, [[side.call(prompt, n_gen)] for prompt in prompts], outcomes.append))
    burst_of(side.name, outcomes, n_gen, None)
    return sorted(outcomes, key=lambda outcome: outcome.client)


def first_ms(side: HttpSide, prompt: Sequence[int], n_gen: int = N_GEN) -> float:
    """Return the time to one prompt's first token."""
    return ttft_ms(ask(side, [prompt], n_gen)[0]) or 0.0


def computed(server: Server, work: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """Do it; return with it the prompt tokens by source that a server of ours counted meanwhile, {} of another's."""
    if not isinstance(server, Ours):
        return work(), {}
    before = server.sources()
    found = work()
    return found, {source: n - before.get(source, 0) for source, n in server.sources().items()}


def columns(found: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> dict[str, list[float]]:
    """Return one value of each round, by server."""
    return {name: [one[key] for one in rounds] for name, rounds in found.items()}


def shared_at_once(rounds: Rounds, n_rounds: int, n_others: int) -> Part:
    """Eight clients with one system prompt, against one client alone with another of the same length."""
    draw = rounds.prompts

    def one(server: Server, at: int) -> dict[str, float]:
        alone, prefix = draw.fresh(SYSTEM_TOKENS), draw.fresh(SYSTEM_TOKENS)
        eight = [draw.on(prefix, OWN_TOKENS) for _ in range(N_CLIENTS)]
        taken: dict[str, float] = {}
        for is_alone in (True, False) if at % 2 else (False, True):
            if is_alone:
                taken["alone"] = first_ms(server.side, draw.on(alone, OWN_TOKENS))
            else:
                outcomes, of = computed(server, lambda: ask(server.side, eight))
                taken["eight"] = median([ttft_ms(outcome) or 0.0 for outcome in outcomes])
                taken["more"] = of.get("computed", 0) - SYSTEM_TOKENS - N_CLIENTS * OWN_TOKENS
            time.sleep(SETTLE_S)
        return taken

    found = rounds.take(n_rounds, n_others, one)
    ours = found[rounds.ours.name]
    more = [taken["more"] for taken in ours]
    ratios = {n: [t["eight"] / t["alone"] for t in taken] for n, taken in found.items()}
    return Part(
        [SHARED_TTFT.of(estimate(ratios[rounds.ours.name])), SHARED_ONCE.worst(more)],
        [
            Beside(f"{_AT_ONCE}: median first token", "ms", columns(found, "eight")),
            Beside("one client alone: first token", "ms", columns(found, "alone")),
            Beside(f"{N_CLIENTS} clients over one", "", ratios),
        ],
        lacks="fewer tokens were counted than had to be computed" if min(more) < 0 else "",
    )


def restarts(rounds: Rounds, n_rounds: int, n_others: int, n_prompts: int) -> Part:
    """Prompts that nobody knows, again, with another end, and with another end after a restart of the server."""
    draw = rounds.prompts

    def one(server: Server, at: int) -> list[dict[str, float]]:
        taken: list[dict[str, float]] = []
        prefixes = [draw.fresh(SYSTEM_TOKENS) for _ in range(n_prompts)]
        for prefix in prefixes:
            prompt = draw.on(prefix, OWN_TOKENS)
            times = {"cold": first_ms(server.side, prompt)}
            time.sleep(SETTLE_S)
            times["again"] = first_ms(server.side, prompt)
            times["end"] = first_ms(server.side, draw.on(prefix, OWN_TOKENS))
            taken.append(times)
        time.sleep(SETTLE_S)
        server.stop()
        server.start()
        ask(server.side, [draw.fresh(OWN_TOKENS)])  # so that the model's pages are in memory
        for times, prefix in zip(taken, prefixes, strict=True):
            prompt = draw.on(prefix, OWN_TOKENS)
            times["after"], of = computed(server, lambda p=prompt: first_ms(server.side, p))  # type: ignore[misc]
            times["disk"] = of.get("disk", 0)
            time.sleep(SETTLE_S)
        return taken

    found = {n: [t for taken in all_taken for t in taken] for n, all_taken in
             rounds.take(n_rounds, n_others, one).items()}  # fmt: skip
    ours = found[rounds.ours.name]
    share = paired_ratio([t["after"] for t in ours], [t["cold"] for t in ours])
    return Part(
        [
            RESTART_TTFT.of(share),
            RESTART_DISK.worst([t["disk"] for t in ours]),
            AGAIN_TTFT.of(estimate([t["again"] for t in ours])),
        ],
        [
            Beside(f"{_ONE}: first token", "ms", columns(found, "cold")),
            Beside("the same prompt again", "ms", columns(found, "again")),
            Beside("with another end", "ms", columns(found, "end")),
            Beside("with another end, after a restart", "ms", columns(found, "after")),
        ],
    )


def hits(rounds: Rounds, n_rounds: int, n_others: int) -> Part:
    """Another question about a document that is known, against one about a document that is not."""
    draw = rounds.prompts

    def one(server: Server, at: int) -> dict[str, float]:
        document = draw.fresh(DOCUMENT_TOKENS)
        cold = first_ms(server.side, draw.on(document, QUESTION_TOKENS))
        time.sleep(SETTLE_S)
        return {"cold": cold, "hit": first_ms(server.side, draw.on(document, QUESTION_TOKENS))}

    found = rounds.take(n_rounds, n_others, one)
    ratios = {n: [t["hit"] / t["cold"] for t in taken] for n, taken in found.items()}
    return Part(
        [HIT_TTFT.of(estimate(ratios[rounds.ours.name]))],
        [
            Beside(f"{_HIT}: first token cold", "ms", columns(found, "cold")),
            Beside(f"{_HIT}: first token of a hit", "ms", columns(found, "hit")),
            Beside("a hit over cold", "", ratios),
        ],
    )


def growing_chat(rounds: Rounds, texts: Iterator[str]) -> Part:
    """A conversation whose answers are those that the server gave, turn by turn."""
    said = [next(texts) for _ in range(N_TURNS + 1)]
    found = rounds.take(1, 1, lambda server, at: _chat(server, said))
    more = {name: taken["more"][1:] for name, (taken,) in found.items()}
    ours = more[rounds.ours.name]
    return Part(
        [CHAT_MORE.worst(ours)],
        [
            Beside(f"{_CHAT}: tokens computed in a turn beyond its new ones", "", more),
            Beside("last 5 turns: first token", "ms", {n: taken["ttft"][-5:] for n, (taken,) in found.items()}),
        ],
        {"chat": {name: taken for name, (taken,) in found.items()}},
        "fewer tokens were counted than had to be computed" if min(ours) < -1 else "",
    )


def _chat(server: Server, said: Sequence[str]) -> dict[str, list[float]]:
    """Return of each turn the time to its first token and, where told, tokens computed beyond those new in it."""
    messages = [{"role": "system", "content": said[-1]}]
    known = 0
    more: list[float] = []
    ttft: list[float] = []
    for text in said[:-1]:
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": TURN_TOKENS, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        outcome, of = computed(server, lambda b=body: _answer(server.side, b))  # type: ignore[misc]
        n_prompt = outcome.prompt_tokens or 0
        cached = outcome.cached_tokens
        n_computed = of["computed"] if of else n_prompt - cached if cached is not None else None
        more += [] if n_computed is None else [n_computed - (n_prompt - known)]
        ttft.append(ttft_ms(outcome) or 0.0)
        known = n_prompt + (outcome.completion_tokens or 0)
        messages.append({"role": "assistant", "content": outcome.text})
        time.sleep(0.1)  # who reads takes longer
    return {"more": more, "ttft": ttft}


def _answer(side: HttpSide, body: Mapping[str, Any]) -> Outcome:
    outcomes: list[Outcome] = []
    call = Call.of("/v1/chat/completions", body, keep_text=True)
    asyncio.run(closed_loop(side.target, [[call]], outcomes.append))
    if outcomes[0].end is not End.ANSWER or not outcomes[0].token_s:
        raise BurstFailed(f"{side.name}: a turn ended as {outcomes[0].end.value} {outcomes[0].error_message}")
    return outcomes[0]
