"""The cases of `kv_cases`: what is asked in which order, and whether the answers are those of an empty cache."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.load import closed_loop
from proof.kv_sides import Ours
from proof.sides import HttpSide

Prompt = tuple[int, ...]
LETTERS = range(65, 123)
"""Ids that are ordinary in every vocabulary here: letters of the fake one, single characters of real ones."""


@dataclass(slots=True)
class Count:
    """What one case came to. `other`: texts that differ from those of an empty cache; `failed`: no answer at all.

    `is_hit`: whether it proves something only where something was cached.
    """

    n: int = 0
    right: int = 0
    other: int = 0
    failed: int = 0
    cached_tokens: int = 0
    is_hit: bool = True
    ends: list[str] = field(default_factory=list)

    @property
    def is_vacuous(self) -> bool:
        """Whether nothing was cached where something was to be."""
        return self.n == 0 or (self.is_hit and self.cached_tokens == 0)

    def told(self) -> str:
        """Return it in words."""
        return f"{self.right} of {self.n} right, {self.other} other, {self.failed} failed, {self.cached_tokens} cached"


@dataclass(slots=True)
class Cases:
    """A server that keeps everything, one that keeps nothing, and what is asked of both."""

    kept: Ours
    cold: Ours
    beside: Ours | None
    rng: random.Random
    n_prompt: int
    n_gen: int
    n_times: int
    n_branches: int
    counts: dict[str, Count] = field(default_factory=dict)
    _texts: dict[tuple[str, Prompt], str] = field(default_factory=dict)

    def fresh(self, n_tokens: int | None = None) -> Prompt:
        """Return a prompt like no other."""
        return tuple(self.rng.choice(LETTERS) for _ in range(n_tokens or self.n_prompt))

    def on(self, prefix: Prompt, n_tokens: int = 9) -> Prompt:
        """Return a prompt that goes on from another's."""
        return prefix + self.fresh(n_tokens)

    def ask(self, server: Ours, prompts: Sequence[Prompt], cancel_after_s: float | None = None) -> list[Outcome]:
        """Send prompts at once; return what became of them, in order."""
        outcomes: list[Outcome] = []
        side = server.side
        clients = [[self.call(side, prompt, cancel_after_s)] for prompt in prompts]
        asyncio.run(closed_loop(side.target, clients, outcomes.append))
        return sorted(outcomes, key=lambda outcome: outcome.client)

    def call(self, side: HttpSide, prompt: Prompt, cancel_after_s: float | None = None) -> Call:
        """Return the request for one greedy answer."""
        return side.call(prompt, self.n_gen, keep_text=True, cancel_after_s=cancel_after_s)

    def expected(self, prompt: Prompt, cold: Ours | None = None) -> str:
        """Return the answer of a server that has nothing cached, and is asked nothing else meanwhile."""
        cold = cold or self.cold
        key = (cold.name, prompt)
        if key not in self._texts:
            (outcome,) = self.ask(cold, [prompt])
            assert outcome.end is End.ANSWER, outcome
            self._texts[key] = outcome.text
        return self._texts[key]

    def check(self, case: str, prompts: Sequence[Prompt], *, is_hit: bool = True, at_once: bool = False) -> None:
        """Ask, one after another or at once, and count what the answers are."""
        count = self.counts.setdefault(case, Count(is_hit=is_hit))
        outcomes = self.ask(self.kept, prompts) if at_once else [self.ask(self.kept, [p])[0] for p in prompts]
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            self.judge(count, outcome, self.expected(prompt))

    def judge(self, count: Count, outcome: Outcome, expected: str) -> None:
        """Count one answer."""
        count.n += 1
        count.cached_tokens += outcome.cached_tokens or 0
        is_answer = outcome.end is End.ANSWER and (outcome.cached_tokens or 0) < (outcome.prompt_tokens or 1)
        count.failed += not is_answer
        count.right += is_answer and outcome.text == expected
        count.other += is_answer and outcome.text != expected
        if not is_answer:
            count.ends.append(f"{outcome.end.value} {outcome.error_code or outcome.fault}".strip())


def all_cases(of: Cases) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases by name; each counts under that name. Later ones find what earlier ones left."""
    for case in (_repeat, _prefix, _one_token, _edit, _branches, _at_once, _evicted, _restarted, _cancelled,
                 _damaged, _killed, _off):  # fmt: skip
        name = (case.__doc__ or "").split(".")[0]
        yield name, lambda case=case, name=name: case(of, name)  # type: ignore[misc]
    if of.beside is not None:
        name = "two models share a disk tier"
        yield name, lambda: _two_models(of, name)
    name = "control: a block of other tokens in the middle must show"
    yield name, lambda: _control(of, name)


def _repeat(of: Cases, name: str) -> None:
    """an exact repeat."""
    for _ in range(of.n_times):
        of.check(name, [of.fresh()] * 3)


def _prefix(of: Cases, name: str) -> None:
    """a prefix of a cached prompt."""
    for _ in range(of.n_times):
        whole = of.fresh()
        of.ask(of.kept, [whole])
        of.check(name, [whole[: of.rng.randrange(2, len(whole))] for _ in range(2)])


def _one_token(of: Cases, name: str) -> None:
    """a prompt of one token."""
    letter = of.fresh(1)
    of.check(name, [letter, letter, of.fresh(1), letter], is_hit=False)


def _edit(of: Cases, name: str) -> None:
    """an edit in the middle."""
    for _ in range(of.n_times):
        whole = of.fresh()
        of.ask(of.kept, [whole])
        at = of.rng.randrange(20, len(whole) - 10)
        of.check(name, [whole[:at] + of.fresh(3) + whole[at + of.rng.choice((0, 3, 7)) :]])


def _branches(of: Cases, name: str) -> None:
    """branches of one prefix, eight at a time."""
    prefix = of.fresh()
    for _ in range(of.n_branches // 8):
        of.check(name, [of.on(prefix) for _ in range(8)], at_once=True)


def _at_once(of: Cases, name: str) -> None:
    """eight at once, some of them alike, answered as one by one."""
    for _ in range(of.n_times):
        first, second = of.fresh(of.n_prompt // 2), of.fresh(of.n_prompt // 3)
        prompts = [first, first, of.on(first), of.on(first, 30), second, of.on(second), of.fresh(), of.fresh(5)]
        of.rng.shuffle(prompts)
        of.check(name, prompts, at_once=True)


def _evicted(of: Cases, name: str) -> None:
    """asked in turn, more than the device holds."""
    documents = [of.fresh() for _ in range(12 if of.n_times > 2 else 8)]
    for _ in range(3):
        of.check(name, [of.on(document, 5) for document in documents])


def _restarted(of: Cases, name: str) -> None:
    """after a restart of the server."""
    prefixes = [of.fresh() for _ in range(of.n_times)]
    for prefix in prefixes:
        of.ask(of.kept, [prefix])
    _restart(of)
    before = of.kept.sources().get("disk", 0)
    of.check(name, [prompt for prefix in prefixes for prompt in (of.on(prefix), prefix, prefix[: of.n_prompt // 2])])
    of.counts[name].ends.append(f"{of.kept.sources().get('disk', 0) - before} tokens from disk")


def _cancelled(of: Cases, name: str) -> None:
    """a client that goes while its prefix is put back."""
    prefixes = [of.fresh() for _ in range(of.n_times)]
    for prefix in prefixes:
        of.ask(of.kept, [prefix])
    _restart(of)
    for prefix in prefixes:
        for _ in range(2):
            of.ask(of.kept, [of.on(prefix)], cancel_after_s=of.rng.uniform(0.0, 0.03))
        of.check(name, [of.on(prefix), prefix])


def _damaged(of: Cases, name: str) -> None:
    """files on disk that were cut, filled, mixed up or changed in one bit."""
    prefixes = [of.fresh() for _ in range(max(4, of.n_times))]
    for prefix in prefixes:
        of.ask(of.kept, [prefix])
    of.kept.stop()
    files = sorted((of.kept.folder / "home").rglob("*.kv"))
    for at, path in enumerate(files):
        _damage(path, files[at - 1], at % 5, of.rng)
    of.kept.start()
    of.check(name, [of.on(prefix) for prefix in prefixes], is_hit=False)
    of.counts[name].ends.append(f"{len(files)} files damaged")


def _damage(path: Path, other: Path, how: int, rng: random.Random) -> None:
    """Change one file, the way a full disk, a bad cable or a careless hand does."""
    data = bytearray(path.read_bytes())
    if how == 0:
        data = data[: rng.randrange(len(data))]
    elif how == 1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:
        data = bytearray(other.read_bytes())
    elif how == 3:
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    else:
        data += b"more"
    path.write_bytes(data)


def _killed(of: Cases, name: str) -> None:
    """after the server and its worker were killed at a random moment."""
    for _ in range(max(1, of.n_times // 5)):
        prefixes = [of.fresh() for _ in range(3)]
        for prefix in prefixes:
            of.ask(of.kept, [prefix, of.on(prefix)])
        of.ask(of.kept, [of.on(prefixes[0])], cancel_after_s=of.rng.uniform(0.0, 0.05))
        pids = [of.kept.serving.pid, *of.kept.serving.workers()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        of.kept.stop()
        of.kept.start()
        of.check(name, [of.on(prefix) for prefix in prefixes], is_hit=False)


def _off(of: Cases, name: str) -> None:
    """a request with cache off uses nothing and leaves nothing."""
    count = of.counts.setdefault(name, Count(is_hit=False))
    side = HttpSide(of.kept.name, of.kept.side.target, {"ignore_eos": True, "cache": "off"})
    for _ in range(of.n_times):
        prompt = of.fresh()
        outcomes: list[Outcome] = []
        plain = of.call(of.kept.side, prompt)
        calls = [of.call(side, prompt), of.call(side, prompt), plain, of.call(side, prompt)]
        asyncio.run(closed_loop(side.target, [calls], outcomes.append))
        for outcome in outcomes:
            of.judge(count, outcome, of.expected(prompt))
        # Letters are few: the beginning of another prompt may be the same.
        if (
            any(outcome.cached_tokens for outcome in outcomes if outcome is not outcomes[2])
            or (outcomes[2].cached_tokens or 0) > len(prompt) // 8
        ):
            count.right -= 1
            count.failed += 1
            count.ends.append("something was cached")


def _two_models(of: Cases, name: str) -> None:
    """Ask both models the same prompts in turn, each after a restart too: neither may use what the other left."""
    assert of.beside is not None
    count = of.counts.setdefault(name, Count())
    prompts = [of.fresh() for _ in range(of.n_times)]
    of.beside.start()
    own = dict(zip(prompts, [of.ask(of.beside, [prompt])[0].text for prompt in prompts], strict=True))
    of.check(name, [of.on(prompt) for prompt in prompts])
    of.check(name, prompts)
    of.beside.stop()
    _restart(of)
    of.beside.start()
    for prompt in prompts:
        of.judge(count, of.ask(of.beside, [prompt])[0], own[prompt])
    of.check(name, prompts)
    of.beside.stop()


def _control(of: Cases, name: str) -> None:
    """Hold answers against those of a prompt with one block of other tokens: a check that finds no difference is none.

    Right here is what differs.
    """
    count = of.counts.setdefault(name, Count(is_hit=False))
    for _ in range(of.n_times):
        prompt = of.fresh()
        wrong = prompt[:64] + of.fresh(min(64, len(prompt) - 65)) + prompt[min(128, len(prompt) - 1) :]
        count.n += 1
        is_same = of.ask(of.kept, [prompt])[0].text == of.expected(wrong)
        count.right += not is_same
        count.other += is_same


def _restart(of: Cases) -> None:
    time.sleep(0.3)
    of.kept.stop()
    of.kept.start()
