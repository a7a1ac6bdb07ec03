"""`rag`: questions about long documents, each document shared by several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import count, spread, tokens, words
from localllm.bench.workloads.prose import Prose, n_words, ordered, place, tag
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing

_HEAD = "Answer the question from the document below and from nothing else."
_RULES = (
    "Give the number of the section that says so.",
    "If the document does not say it, say that it does not.",
    "Use the words of the document where you can.",
    "Keep numbers and dates as they are.",
)
_SECTION_WORDS = 110
_LEAST_MORE_WORDS = 8  # as few as a sentence has


@dataclass(frozen=True, slots=True)
class RagParameters:
    """How many documents, how long, and what is asked of them."""

    documents: int = count(4, 1, 10_000, "different documents; sessions take them in turn")
    document: int = words(600, "a document")
    questions: int = count(4, 1, 1_000, "requests of one session, all about one document")
    question: int = words(16, "a question")
    answer: int = tokens(48, "an answer")
    spread: float = spread(0.2)


@dataclass(frozen=True, slots=True)
class _Document:
    """A text in sections; `things` holds what each is about."""

    trade: str
    text: str
    things: tuple[str, ...]


def _sessions(of: RagParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    lengths = _lengths(of)
    instruction = ordered(Draws(seed, "rag"), _HEAD, _RULES)
    at = 0
    while True:
        document = _document(prose, Draws(seed, "rag document", at % of.documents), lengths["document"])
        draws = Draws(seed, "rag", at)
        system = {"role": "system", "content": f"{instruction}\n\n{document.text}"}
        yield tuple(
            Ask(
                "rag",
                lengths["answer"].draw(draws),
                messages=(
                    system,
                    {"role": "user", "content": _question(prose, draws, document, lengths["question"].draw(draws))},
                ),
            )
            for _ in range(of.questions)
        )
        at += 1


def _document(prose: Prose, draws: Draws, length: Lengths) -> _Document:
    """Return a document of about the drawn length: a title, then sections of some hundred words."""
    trade = draws.pick(prose.trades)
    parts = [f"# The {trade} of {place(draws)}: report {tag(draws)}"]
    things: list[str] = []
    missing = length.draw(draws) - n_words(parts[0])
    while missing > 0:
        thing = f"{prose.phrase(draws, trade, 'quality')} {prose.phrase(draws, trade, 'thing')}"
        things.append(thing)
        heading = f"## {len(things)}. The {thing}"
        body = prose.text(draws, trade, min(_SECTION_WORDS, missing) - n_words(heading))
        parts.append(f"{heading}\n{body}")
        missing -= n_words(parts[-1])
    return _Document(trade, "\n\n".join(parts), tuple(things))


def _question(prose: Prose, draws: Draws, document: _Document, length: int) -> str:
    """Return a question about one section, with some words around it."""
    at = draws.below(len(document.things)) if document.things else 0
    thing = document.things[at] if document.things else "place"
    form = draws.pick(
        (
            "what does section {at} say about the {thing}, given that {cause}?",
            "who dealt with the {thing}, and was it because {cause}?",
            "is it true for the {thing} that {cause}?",
            "which numbers are given for the {thing}, apart from {number} {goods}?",
            "after trouble with the {thing}, was it so that {result}?",
        )
    )
    asked = prose.filled_in(draws, document.trade, form.replace("{at}", str(at + 1)).replace("{thing}", thing))
    left = length - n_words(asked)
    return f"{prose.text(draws, document.trade, left)} {asked}" if left >= _LEAST_MORE_WORDS else asked


def _lengths(of: RagParameters) -> Mapping[str, Lengths]:
    return {
        "document": Lengths(of.document, of.spread),
        "question": Lengths(of.question, of.spread),
        "answer": Lengths(of.answer, of.spread, "tokens"),
    }


def _sharing(of: RagParameters) -> Sharing:
    lengths = _lengths(of)
    before = n_words(" ".join((_HEAD, *_RULES))) + lengths["document"].mean
    share = before / (before + lengths["question"].mean)
    part = Shared("the instruction and the document", "all requests about that document", str(of.documents))
    return Sharing((part,), share, share)


RAG = Recipe(
    name="rag",
    effect="questions about long documents, each shared by several requests",
    parameters=RagParameters,
    sessions=_sessions,
    n_asks=lambda of: of.questions,
    lengths=_lengths,
    sharing=_sharing,
)
