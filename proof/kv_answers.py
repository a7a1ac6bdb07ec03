"""Asks for greedy answers with what was nearly chosen, and judges them against those of an empty cache.

Where answers repeat to the last bit, text and logprobs must be equal. Else what was cached may move a logprob by
what other batch shapes move it, and the text where the cold answer held two tokens for as good as equal: by at
most DRIFT_NATS (docs/decisions/016-what-a-golden-takes-for-the-same.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from localllm.bench.goldens.checking import DRIFT_NATS, Move, compare
from proof.kv_sides import Ours, text
from proof.sides import BurstFailed

Prompt = tuple[int, ...]
N_TOP = 5
MIN_HIT_TOKENS = 32
"""Prompts of letters drawn at random begin with the same few now and then: that is no hit."""


class Verdict(Enum):
    """What an answer is beside that of an empty cache."""

    RIGHT = "right"
    NEAR = "near"  # another text, from a near tie on
    WRONG = "wrong"
    FAILED = "failed"  # no answer at all


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `places`: of each token the likeliest with their logprobs, by spelling. `failure`: why it is none."""

    text: str = ""
    tokens: tuple[str, ...] = ()
    places: tuple[dict[str, float], ...] = ()
    n_prompt: int = 0
    n_cached: int = 0
    failure: str = ""

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """Read the body of a completion with logprobs."""
        (choice,), usage = body["choices"], body["usage"]
        told = choice["logprobs"]
        n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        failure = "" if n_cached < usage["prompt_tokens"] else "more was cached than may be"
        places = tuple(told["top_logprobs"])
        return cls(choice["text"], tuple(told["tokens"]), places, usage["prompt_tokens"], n_cached, failure)

    def entry(self) -> dict[str, Any]:
        """Return it in the shape of a golden's entry."""
        logprobs = [list(place.items()) for place in self.places]
        return {"name": "", "refused": "", "prompt_ids": [], "ids": self.tokens, "answer": self.text,
                "logprobs": logprobs}  # fmt: skip


def answers(server: Ours, prompts: Sequence[Prompt], n_gen: int, **fields: Any) -> list[Answer]:
    """Send prompts at once; return their answers in order."""
    side = server.side

    def one(prompt: Prompt) -> Answer:
        body = {"prompt": list(prompt), "max_tokens": n_gen, "temperature": 0, "logprobs": N_TOP}
        try:
            return Answer.of(json.loads(text(side.target, "/v1/completions", {**body, **side.fields, **fields})))
        except (BurstFailed, OSError) as error:
            return Answer(failure=f"{type(error).__name__}: {error}"[:200])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def verdict(cold: Answer, found: Answer, *, is_exact: bool) -> Verdict:
    """Judge an answer."""
    if cold.failure or found.failure:
        return Verdict.FAILED
    if is_exact:
        is_same = (found.text, found.tokens, found.places) == (cold.text, cold.tokens, cold.places)
        return Verdict.RIGHT if is_same else Verdict.WRONG
    check = compare(cold.entry(), found.entry())
    if not check.moves:
        return Verdict.RIGHT
    is_tie = check.gap_nats is not None and check.gap_nats <= DRIFT_NATS
    return Verdict.NEAR if is_tie and Move.LOGPROBS not in check.moves else Verdict.WRONG


@dataclass(slots=True)
class Count:
    """What one case came to: answers by verdict, and what it was seen to do.

    `proof`: what had to happen so that the case proves anything, `owed` times at least; it was seen `proven` times.
    """

    proof: str = ""
    n: int = 0
    right: int = 0
    near: int = 0
    wrong: int = 0
    failed: int = 0
    cached_tokens: int = 0
    owed: int = 0
    proven: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, found: Answer, judged: Verdict) -> None:
        """Count one answer."""
        self.n += 1
        self.cached_tokens += found.n_cached
        self.right += judged is Verdict.RIGHT
        self.near += judged is Verdict.NEAR
        self.wrong += judged is Verdict.WRONG
        self.failed += judged is Verdict.FAILED
        self.notes += [found.failure] if found.failure else []

    def told(self) -> str:
        """Return it in words."""
        judged = f"{self.right} of {self.n} right, {self.near} near, {self.wrong} wrong, {self.failed} failed"
        return f"{judged}; {self.proof}: {self.proven} ({self.owed} or more asked)" if self.proof else judged
