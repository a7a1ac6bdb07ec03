"""`batch`: many short texts to put into one of a few classes, one instruction for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import count, spread, tokens, words
from localllm.bench.workloads.prose import Prose
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """Lengths of the instruction and of the texts."""

    instruction: int = words(120, "the instruction, the same in all requests")
    labels: int = count(6, 2, 10, "classes to choose from")
    item: int = words(20, "a text to classify")
    answer: int = tokens(8, "at most the name of a class")
    spread: float = spread(0.4)


def _sessions(of: BatchParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    item = _lengths(of)["item"]
    shared = Draws(seed, "batch")
    labels = shared.shuffled(prose.trades)[: of.labels]
    system = {"role": "system", "content": _instruction(prose, shared, labels, of.instruction)}
    at = 0
    while True:
        draws = Draws(seed, "batch", at)
        text = prose.text(draws, draws.pick(labels), item.draw(draws))
        yield (Ask("batch", of.answer, messages=(system, {"role": "user", "content": text}), is_free=False),)
        at += 1


def _instruction(prose: Prose, draws: Draws, labels: list[str], length: int) -> str:
    """Return what is to be done, and for each label what belongs to it."""
    head = f"Read the message and answer with one of these words only: {', '.join(labels)}. No other word."
    lines = [f"- {label}:" for label in labels]
    missing = length - len(head.split()) - 2 * len(labels)
    at = 0
    while at < len(labels) or missing > 0:
        sentence = prose.sentence(draws, labels[at % len(labels)])
        lines[at % len(labels)] += f" {sentence}"
        missing -= len(sentence.split())
        at += 1
    return "\n".join([head, *lines])


def _lengths(of: BatchParameters) -> Mapping[str, Lengths]:
    return {
        "instruction": Lengths(of.instruction, 0),
        "item": Lengths(of.item, of.spread),
        "answer": Lengths(of.answer, 0, "tokens"),
    }


def _sharing(of: BatchParameters) -> Sharing:
    share = of.instruction / (of.instruction + _lengths(of)["item"].mean)
    return Sharing((Shared("the instruction", "all requests", "1"),), share, share)


BATCH = Recipe(
    name="batch",
    effect="many short texts to classify, one instruction for all",
    parameters=BatchParameters,
    sessions=_sessions,
    n_asks=lambda of: 1,
    lengths=_lengths,
    sharing=_sharing,
)
