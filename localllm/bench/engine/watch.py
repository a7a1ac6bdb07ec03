"""Submits prompts of made-up tokens to a service and notes when each token of the answers came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from localllm.bench.stats.summaries import mean
from localllm.runtime import events
from localllm.runtime.service import Service
from localllm.runtime.stream import TokenStream, rebuild
from localllm.runtime.types import CompletionRequest, GenerationOptions


class Prompts:
    """A seeded source of token ids; each prompt begins with an id of its own.

    So no prefix that the runtime holds can serve the next prompt (until the vocabulary is used up).
    """

    def __init__(self, n_vocab: int, seed: int = 0) -> None:
        import numpy as np

        self._rng = np.random.default_rng(seed)
        self._firsts = self._rng.permutation(n_vocab)
        self._n_vocab = n_vocab
        self._n_drawn = 0

    def draw(self, n_tokens: int) -> tuple[int, ...]:
        """Return the next prompt: [n_tokens] ids."""
        first = int(self._firsts[self._n_drawn % self._n_vocab])
        self._n_drawn += 1
        return (first, *self._rng.integers(0, self._n_vocab, n_tokens - 1).tolist())


@dataclass(frozen=True, slots=True)
class Timeline:
    """One answer: when it was asked for, when each token came, and how much of the prompt was held already."""

    submitted_s: float
    token_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.token_s[0] - self.submitted_s

    @property
    def total_s(self) -> float:
        """Seconds from the request to its last token."""
        return self.token_s[-1] - self.submitted_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.token_s[-1] - self.token_s[0]


class _Reader:
    """Reads one stream; `n_tokens` is how far it is."""

    def __init__(self, submitted_s: float, stream: TokenStream) -> None:
        self.submitted_s = submitted_s
        self.stream = stream
        self.token_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0
        self.ended = False

    @property
    def n_tokens(self) -> int:
        return len(self.token_s)

    def take(self, timeout_s: float | None) -> bool:
        """Take one event; return False when there was none in time. Raises the error an event tells of."""
        event = self.stream.next_event(timeout_s)
        now_s = time.perf_counter()
        match event:
            case None:
                return False
            case events.Token():
                self.token_s.extend([now_s] * len(event.ids))
            case events.Admitted():
                self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = sum(event.cached_tokens.values())
            case events.Error():
                self.ended = True
                raise rebuild(event)
            case events.Done():
                self.ended = True
            case _:
                pass
        return True


N_TRIES = 5
"""How often sequences are started that are to decode together, before a row is left out."""


class NeverTogether(Exception):
    """One sequence had ended before another began: there is no step in which all of them decode."""


def watch(service: Service, prompts: Sequence[Sequence[int]], n_gen: int) -> list[Timeline]:
    """Decode `n_gen` tokens greedily after each prompt, all at once; return a timeline for each.

    One thread reads all streams: it waits on the one that is furthest behind and then takes what
    the others have, so that a step wakes it about once, as it would a server.
    """
    options = GenerationOptions(max_tokens=n_gen, ignore_eos=True, seed=0, sampling={"temperature": 0.0})
    readers: list[_Reader] = []
    try:
        for prompt in prompts:
            submitted_s = time.perf_counter()
            readers.append(_Reader(submitted_s, service.submit(CompletionRequest(tuple(prompt), options))))
        while at_work := [reader for reader in readers if not reader.ended]:
            min(at_work, key=lambda reader: reader.n_tokens).take(None)
            for reader in at_work:
                while not reader.ended and reader.take(0):
                    pass
    finally:
        for reader in readers:
            if not reader.ended:
                reader.stream.cancel()
    return [Timeline(r.submitted_s, tuple(r.token_s), r.prompt_tokens, r.cached_tokens) for r in readers]


def seconds_per_step(timelines: Sequence[Timeline]) -> float:
    """Return the seconds of a step while every sequence decodes: from the last first token to the first last one.

    Each sequence's own times give its pace there; the mean of the paces is returned.
    Raises: NeverTogether.
    """
    begin = max(t.token_s[0] for t in timelines)
    end = min(t.token_s[-1] for t in timelines)
    within = [[moment for moment in t.token_s if begin <= moment <= end] for t in timelines]
    if min(map(len, within)) < 2:
        raise NeverTogether
    return mean([(moments[-1] - moments[0]) / (len(moments) - 1) for moments in within])


def pace_s(service: Service, prompts: Sequence[Sequence[int]], n_gen: int) -> float:
    """Decode after all prompts at once; return the seconds of a step in which every sequence decodes.

    On a busy machine the steps of a tiny model can be over before the next prompt is submitted:
    it is tried again. Raises: NeverTogether after the last try.
    """
    for _ in range(N_TRIES - 1):
        with suppress(NeverTogether):
            return seconds_per_step(watch(service, prompts, n_gen))
    return seconds_per_step(watch(service, prompts, n_gen))
