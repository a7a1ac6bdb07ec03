"""`story`: short prompts that ask for long answers, nothing shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import spread, tokens, words
from localllm.bench.workloads.prose import Prose
from localllm.bench.workloads.recipe import Recipe, Sharing

_FORMS = ("a story", "a tale for children", "a ballad in prose", "a mystery", "a diary", "a monologue", "a fable")
_TONES = ("calmly told", "in the present", "with much talk", "full of smells and sounds", "in plain words", "with wit")

_FRAME_WORDS = 9  # of the sentence around them


@dataclass(frozen=True, slots=True)
class StoryParameters:
    """Lengths of a request for a story."""

    prompt: int = words(25, "what the story is to be about")
    answer: int = tokens(256, "the story")
    spread: float = spread(0.3)


def _sessions(of: StoryParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    lengths = _lengths(of)
    at = 0
    while True:
        draws = Draws(seed, "story", at)
        plot = prose.text(draws, draws.pick(prose.trades), max(1, lengths["prompt"].draw(draws) - _FRAME_WORDS), "plot")
        request = f"{plot} Write {draws.pick(_FORMS)} of this, {draws.pick(_TONES)}."
        yield (Ask("story", lengths["answer"].draw(draws), messages=({"role": "user", "content": request},)),)
        at += 1


def _lengths(of: StoryParameters) -> Mapping[str, Lengths]:
    return {"prompt": Lengths(of.prompt, of.spread), "answer": Lengths(of.answer, of.spread, "tokens")}


STORY = Recipe(
    name="story",
    effect="short prompts, long answers",
    parameters=StoryParameters,
    sessions=_sessions,
    n_asks=lambda of: 1,
    lengths=_lengths,
    sharing=lambda of: Sharing((), 0.0, 0.0),
)
