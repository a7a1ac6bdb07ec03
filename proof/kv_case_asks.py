"""What the cases of `kv_cases` ask with: a server that keeps everything beside one that keeps nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.bench.client.calls import Outcome
from localllm.bench.client.client import Client
from proof.kv_answers import MIN_HIT_TOKENS, Answer, Count, Prompt, Verdict, answers, verdict
from proof.kv_sides import Ours
from proof.kv_streams import beside
from proof.sides import HttpSide

LETTERS = range(65, 123)
"""Ids that are ordinary in every vocabulary here: letters of the fake one, single characters of real ones."""
HITS = f"answers with {MIN_HIT_TOKENS} tokens or more from the cache"
FROM_DISK = f"answers with {MIN_HIT_TOKENS} tokens or more from disk"
CUE_TOKENS = 12
AT_TOKEN, STREAM_GEN = 8, 100


@dataclass(slots=True)
class Cases:
    """A server that keeps everything, one that keeps nothing, and what is asked of both.

    `is_exact`: answers repeat to the last bit. `puts_back_at_once`: a prefix comes back in one step.
    """

    kept: Ours
    cold: Ours
    beside: Ours | None
    rng: random.Random
    n_prompt: int
    n_gen: int
    n_times: int
    n_branches: int
    is_exact: bool = True
    puts_back_at_once: bool = False
    counts: dict[str, Count] = field(default_factory=dict)
    _cold: dict[Prompt, Answer] = field(default_factory=dict)

    def letters(self, n_tokens: int) -> Prompt:
        """Return tokens like no others."""
        return tuple(self.rng.choice(LETTERS) for _ in range(n_tokens))

    def fresh(self, n_tokens: int | None = None) -> Prompt:
        """Return a prompt like no other."""
        return self.on(self.letters((n_tokens or self.n_prompt) - CUE_TOKENS))

    def on(self, prefix: Prompt, n_tokens: int = CUE_TOKENS) -> Prompt:
        """Return a prompt that goes on from another's: it begins to repeat some place of it.

        A model goes on repeating, so that its answer hangs on what the cache holds of that place.
        """
        start = self.rng.randrange(max(1, len(prefix) - 2 * n_tokens))
        return prefix + prefix[start : start + n_tokens]

    def ask(self, server: Ours, *prompts: Prompt) -> list[Answer]:
        """Send prompts at once; return their answers, in order."""
        return answers(server, prompts, self.n_gen)

    def expected(self, prompt: Prompt) -> Answer:
        """Return the answer of a server that has nothing cached, and is asked nothing else meanwhile."""
        if prompt not in self._cold:
            self._cold[prompt] = self.ask(self.cold, prompt)[0]
        return self._cold[prompt]

    def judged(self, prompt: Prompt, found: Answer) -> Verdict:
        """Judge an answer against that of an empty cache."""
        return verdict(self.expected(prompt), found, is_exact=self.is_exact)

    def count(self, case: str, proof: str, owed: int = 0) -> Count:
        """Return the count of a case, of which so much more is to be seen."""
        count = self.counts.setdefault(case, Count(proof))
        count.owed += owed
        return count

    def check(self, case: str, prompts: Sequence[Prompt], *, owed: int, at_once: bool = False) -> None:
        """Ask, one after another or at once, and count what the answers are; of `owed` or more much is cached."""
        count = self.count(case, HITS, owed)
        found = self.ask(self.kept, *prompts) if at_once else [self.ask(self.kept, prompt)[0] for prompt in prompts]
        for prompt, answer in zip(prompts, found, strict=True):
            count.add(answer, self.judged(prompt, answer))
            count.proven += answer.n_cached >= MIN_HIT_TOKENS

    def check_disk(self, case: str, prompts: Sequence[Prompt], *, owed: int) -> None:
        """Ask one after another and count; of `owed` or more much comes from disk."""
        count = self.count(case, FROM_DISK, owed)
        for prompt in prompts:
            n_before = self.kept.sources().get("disk", 0)
            answer = self.ask(self.kept, prompt)[0]
            count.proven += self.kept.sources().get("disk", 0) - n_before >= MIN_HIT_TOKENS
            count.add(answer, self.judged(prompt, answer))

    def cancelled(self, prompt: Prompt, after_s: float, *, beside_stream: bool = False) -> Outcome:
        """Send a prompt and go away after some time; beside another client's stream, that the work comes in pieces."""
        side = self.kept.side
        call = side.call(prompt, self.n_gen, cancel_after_s=after_s)
        if beside_stream:
            other = HttpSide(side.name, side.target, {"ignore_eos": True, "cache": "off"})
            stream = other.call(self.letters(5), STREAM_GEN)
            return asyncio.run(beside(lambda: stream, self.kept, call, AT_TOKEN))[1]

        async def alone() -> Outcome:
            client = Client(side.target)
            try:
                return await client.send(call)
            finally:
                client.close()

        return asyncio.run(alone())

    def restart(self) -> None:
        """Stop the server and start it again on the same folder."""
        self.kept.stop()
        self.kept.start()
