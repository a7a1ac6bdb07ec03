"""Texts for requests, from a seed: stories to go on with, none like another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

WORDS = """
    river stone lamp garden winter paper bridge silver morning letter forest kitchen mountain window music boat
    summer market teacher ladder cloud engine shadow island village orange pocket station theatre carpet harbour
    candle meadow copper feather tunnel basket mirror button castle thunder valley ribbon pepper saddle anchor
    walked carried opened painted followed remembered borrowed crossed gathered listened promised repaired
    quiet narrow heavy golden distant careful hollow patient sudden gentle clever broken wooden
    slowly under behind toward without between after before
""".split()  # noqa: SIM905


def story(rng: random.Random, n_words: int) -> str:
    """Return a text of about `n_words` words that begins like no other of this generator's."""
    words = [rng.choice(WORDS) for _ in range(n_words)]
    sentences = [" ".join(words[start : start + 9]).capitalize() for start in range(0, n_words, 9)]
    return f"Chapter {rng.randrange(10**6)}. " + ". ".join(sentences) + "."


def stories(seed: int, n_words: int) -> Iterator[str]:
    """Yield texts without end."""
    rng = random.Random(seed)
    while True:
        yield story(rng, n_words)


def token_prompts(
    encode: Callable[[str], Sequence[int]], n_vocab: int, seed: int, n_tokens: int
) -> Iterator[tuple[int, ...]]:
    """Yield prompts of exactly `n_tokens` ids, `n_vocab` of them, each with a first id of its own.

    So that no prefix that a server holds can serve the next. `encode` turns text into ids.
    """
    firsts = random.Random(seed).sample(range(n_vocab), n_vocab)
    texts = stories(seed, n_tokens + 8)
    for first in firsts:
        ids = encode(next(texts))
        while len(ids) < n_tokens:
            ids = [*ids, *encode(next(texts))]
        yield (first, *ids[1:n_tokens])
