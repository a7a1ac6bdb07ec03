"""`code-edit`: a file is to be given back with one small change, so that the answer is a copy of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.workloads.ask import Ask, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import count, spread, words
from localllm.bench.workloads.prose import n_words, ordered
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing
from localllm.bench.workloads.source import Source, fresh_name, write_source
from localllm.bench.workloads.source_forms import ADJECTIVES, NOUNS

_HEAD = "You edit Python files. Give back the whole file with the change that is asked for."
_RULES = (
    "Leave everything else exactly as it is.",
    "Put the file into one code block.",
    "Write nothing before or after the block.",
    "Do not add comments of your own.",
)
_EDIT_WORDS = 13  # of the requests below, on average
_CHARS_PER_TOKEN = 2.5  # fewer than any tokeniser needs, so that the limit does not cut the file


@dataclass(frozen=True, slots=True)
class CodeEditParameters:
    """How long the files are and how many changes are asked of each."""

    file: int = words(160, "a file (what white space separates)")
    edits: int = count(2, 1, 1_000, "requests of one session, each another change of one file")
    spread: float = spread(0.3)


def _sessions(of: CodeEditParameters, seed: int) -> Iterator[Session]:
    length = _lengths(of)["file"]
    instruction = ordered(Draws(seed, "code-edit"), _HEAD, _RULES)
    at = 0
    while True:
        draws = Draws(seed, "code-edit", at)
        source = write_source(draws, length.draw(draws))
        system = {"role": "system", "content": f"{instruction}\n\n```python\n{source.text}```"}
        limit = round(len(source.text) / _CHARS_PER_TOKEN) + 48
        yield tuple(
            Ask("code-edit", limit, messages=(system, {"role": "user", "content": edit(draws, source)}), is_free=False)
            for _ in range(of.edits)
        )
        at += 1


def edit(draws: Draws, source: Source) -> str:
    """Return a request for one small change of `source`."""
    function = draws.pick(source.functions)
    constant, value = draws.pick(source.constants)
    other = fresh_name(draws, draws.pick(NOUNS), {function.name for function in source.functions})
    return draws.pick(
        (
            f"Rename {function.name} to {other}, wherever it is named.",
            f"Set {constant} to {value + draws.between(1, 99)} instead of {value}.",
            f"Let {function.parameter} of {function.name} default to {function.default * 2}, no longer to "
            f"{function.default}.",
            f"Change the docstring of {function.name} to: Handle each {draws.pick(ADJECTIVES)} "
            f"{draws.pick(NOUNS)} once.",
            f"Rename the parameter {function.parameter} of {function.name} to "
            f"{function.parameter}_{draws.pick(NOUNS)}.",
        )
    )


def _lengths(of: CodeEditParameters) -> Mapping[str, Lengths]:
    return {"file": Lengths(of.file, of.spread)}


def _sharing(of: CodeEditParameters) -> Sharing:
    instruction = n_words(" ".join((_HEAD, *_RULES)))
    before = instruction + _lengths(of)["file"].mean
    repeated = (instruction + (of.edits - 1) * before) / of.edits
    parts = (
        Shared("the instruction", "all requests", "1"),
        Shared("the file", "all requests of a session", "1 a session"),
    )
    return Sharing(parts, repeated / (before + _EDIT_WORDS), before / (before + _EDIT_WORDS))


CODE_EDIT = Recipe(
    name="code-edit",
    effect="a Python file to be given back with a small change: the answer copies the prompt",
    parameters=CodeEditParameters,
    sessions=_sessions,
    n_asks=lambda of: of.edits,
    lengths=_lengths,
    sharing=_sharing,
)
