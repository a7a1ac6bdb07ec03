"""Python source of a wanted length: valid, plausible, with functions that an edit can name."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.source_forms import (
    ADJECTIVES,
    ATTRIBUTES,
    CLASS,
    FORMS,
    HEAD,
    NOUNS,
    PARAMETERS,
    RECORD,
    TYPES,
    VERBS,
)

_TRIES = 3  # before a name gets a number


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a source: its name, docstring, and a parameter with its default."""

    name: str
    docstring: str
    parameter: str
    default: int


@dataclass(frozen=True, slots=True)
class Source:
    """A module's text, its functions, and its constants with their values."""

    text: str
    functions: tuple[Function, ...]
    constants: tuple[tuple[str, int], ...]


def write_source(draws: Draws, n_words: int) -> Source:
    """Return a module of about `n_words` (what white space separates), to within a function; one function at least."""
    noun = draws.pick(NOUNS)
    constants = tuple(
        (f"{draws.pick(words).upper()}_{suffix}", draws.between(2, 900))
        for words, suffix in ((VERBS, "LIMIT"), (NOUNS, "BATCH"), (ATTRIBUTES, "FLOOR"))
    )
    head = HEAD.format(
        noun=noun,
        adjective=draws.pick(ADJECTIVES),
        attribute=draws.pick(ATTRIBUTES),
        constants="\n".join(f"{name} = {value}" for name, value in constants),
    )
    fields = dict.fromkeys(draws.shuffled(ATTRIBUTES)[: draws.between(2, 5)])
    record = RECORD.format(
        record=noun.capitalize(),
        adjective=draws.pick(ADJECTIVES),
        noun=noun,
        fields="\n".join(f"    {field}: {draws.pick(TYPES)}" for field in fields),
    )
    blocks, used = [head, record], set[str]()
    functions: list[Function] = []
    missing = n_words - len(head.split()) - len(record.split())
    while True:
        function, text = _function(draws, used)
        length = len(text.split())
        if functions and length > 2 * missing:
            text = "\n\n\n".join(block.strip("\n") for block in blocks)
            return Source(f"{text}\n", tuple(functions), constants)
        blocks.append(text)
        functions.append(function)
        missing -= length


def _function(draws: Draws, used: set[str]) -> tuple[Function, str]:
    """Return a function whose name is not in `used`, and its text; adds its name there."""
    noun, other = draws.pick(NOUNS), draws.pick(NOUNS)
    name = fresh_name(draws, noun, used)
    attribute, parameter = draws.pick(ATTRIBUTES), draws.pick(PARAMETERS)
    default = draws.between(2, 120)
    docstring = draws.pick(
        (
            f"Return the {draws.pick(ADJECTIVES)} {noun}s by their {attribute}.",
            f"Go through the {noun}s of one {other}; only what is {draws.pick(ADJECTIVES)} in {attribute} counts.",
            f"{name.split('_')[0].capitalize()} every {noun} whose {attribute} is {draws.pick(ADJECTIVES)}.",
            f"Take the {noun}s in the order of their {attribute}, at most as many as {parameter} says.",
        )
    )
    form = draws.pick(FORMS)
    if form.startswith(CLASS):
        name = "".join(word.capitalize() for word in name.split("_"))
    text = form.format(
        name=name,
        noun=noun,
        nouns=f"{noun}s",
        other=other,
        attribute=attribute,
        second=draws.pick([word for word in ATTRIBUTES if word != attribute]),
        parameter=parameter,
        default=default,
        small=draws.between(2, 9),
        large=draws.between(100, 9_999),
        docstring=docstring,
        adjective=draws.pick(ADJECTIVES),
    )
    return Function(name, docstring, parameter, default), text


def fresh_name(draws: Draws, noun: str, used: set[str]) -> str:
    """Return a function's name that is not in `used`, and add it there."""
    name = ""
    for _ in range(_TRIES):
        name = f"{draws.pick(VERBS)}_{noun}s"
        if name not in used:
            break
    else:
        name = f"{name}_{len(used)}"
    used.add(name)
    return name
