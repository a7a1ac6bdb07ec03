"""In which ways endpoints of one model differ, by what probe requests found out, and whether that forbids a ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.bench.serving.probing.asks import NEAR_TIE, PLAIN_CHATS
from localllm.bench.serving.probing.greedy import Greedy, parting
from localllm.bench.serving.probing.probes import Honour, Probes


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which candidates of the same model differ. `what`: a word for it, as documents have it."""

    what: str
    sentence: str
    forbids_ranking: bool


def differences(by_name: Mapping[str, Probes]) -> list[Difference]:
    """Return in which ways candidates that serve the same model differ, those first that forbid a ranking."""
    found: list[Difference] = []
    if len(by_name) < 2:
        return found
    for probing in (_prompt_tokens, _greedy, _exact, _limits, _streams, _told):
        found += probing(by_name)
    return sorted(found, key=lambda difference: not difference.forbids_ranking)


def _prompt_tokens(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    silent = [name for name, probes in by_name.items() if not any(n is not None for n in probes.prompt_tokens)]
    if silent:
        sentence = f"{_names(silent)} {_do(silent, 'tell')} no prompt tokens: whether the prompts are equal is unknown."
        yield Difference("prompt_tokens", sentence, True)
    for number, counts in _numbered(by_name, lambda probes: probes.prompt_tokens):
        groups = _groups({name: count for name, count in counts.items() if count is not None})
        if len(groups) < 2:
            continue
        told = "; ".join(f"{_names(names)} {_do(names, 'count')} {count}" for count, names in groups)
        if number <= PLAIN_CHATS:
            yield Difference(
                "prompt_tokens", f"Prompt tokens of probe {number}: {told}: another template or tokenizer.", True
            )
        else:
            yield Difference(
                "control_tokens",
                f"Prompt tokens of a text that spells control tokens: {told}; no workload holds such text.",
                False,
            )


def _greedy(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    for name, probes in by_name.items():
        unsteady = [str(number) for number, one in enumerate(probes.greedy, 1) if one is not None and not one.repeats]
        missing = [str(number) for number, one in enumerate(probes.greedy, 1) if one is None]
        if unsteady:
            sentence = f"{name} gives another answer to the same greedy request: probe {', '.join(unsteady)}."
            yield Difference("greedy_repeat", sentence, True)
        if missing:
            yield Difference("greedy_text", f"{name} gives no answer to probe {', '.join(missing)}.", True)
    if not any(one.text for probes in by_name.values() for one in probes.greedy if one is not None):
        yield Difference("greedy_text", "No greedy answer has any text: whether answers are equal is unknown.", True)
    for number, answers in _numbered(by_name, lambda probes: probes.greedy):
        given = [(name, one) for name, one in answers.items() if one is not None]
        yield from _partings(number, given)
        reasons = _groups({name: one.finish_reason for name, one in given})
        if len(reasons) > 1 and len({one.text for _, one in given}) == 1:
            told = "; ".join(f"{_names(names)}: {reason or 'none'}" for reason, names in reasons)
            yield Difference("finish_reason", f"Why the greedy answer to probe {number} ended: {told}.", False)


def _partings(number: int, given: Sequence[tuple[str, Greedy]]) -> Iterator[Difference]:
    """Yield where the others' answers part from the first's."""
    for name, other in given[1:]:
        first_name, first = given[0]
        found = parting(first, other)
        if found is None:
            continue
        where = f"The greedy answers of {first_name} and {name} to probe {number} part after {found.n_characters}"
        if found.is_near_tie:
            why = f"within {NEAR_TIE:g} nats of each other for both: other sums, not another model"
            yield Difference("near_tie", f"{where} characters, where two tokens are {why}.", False)
        else:
            yield Difference("greedy_text", f"{where} characters.", True)


def _exact(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    sure: list[int] = []
    tied: list[int] = []
    for number, answers in _numbered(by_name, lambda probes: probes.exact):
        if len(_groups(answers)) < 2:
            continue
        given = [probes.short[number - 1] for probes in by_name.values() if number <= len(probes.short)]
        (tied if _part_at_near_ties(given) else sure).append(number)
    right = ", ".join(f"{name} {probes.n_right} right" for name, probes in by_name.items())
    n_all = max(len(probes.exact) for probes in by_name.values())
    for numbers, where, forbids in ((sure, "", True), (tied, " where two tokens are nearly equal", False)):
        if numbers:
            sentence = f"{len(numbers)} of {n_all} short answers differ{where} ({right})."
            yield Difference("exact_answers", sentence, forbids)


def _part_at_near_ties(given: Sequence[Greedy | None]) -> bool:
    """Whether all that part from the first do so where it means little."""
    first = given[0]
    if first is None or None in given:
        return False
    found = [parting(first, other) for other in given[1:] if other is not None]
    return all(one is None or one.is_near_tie for one in found)


def _limits(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    kinds: tuple[tuple[str, str, Callable[[Probes], Honour], bool], ...] = (
        ("max_tokens", "max_tokens", lambda probes: probes.max_tokens, True),
        ("stop", "stop", lambda probes: probes.stop, False),
        ("ignore_eos", "ignore_eos", lambda probes: probes.ignore_eos, False),
        ("response_format", "response_format", lambda probes: probes.json_schema, False),
        ("tools", "tools", lambda probes: probes.offered_tools, False),
        ("tool_choice", "tool_choice: required", lambda probes: probes.forced_tools, False),
    )
    for what, words, of, forbids in kinds:
        groups = _groups({name: of(probes) for name, probes in by_name.items()})
        if forbids:
            ignoring = [name for value, names in groups for name in names if value in ("ignored", "refused")]
            if ignoring:
                yield Difference(what, f"{_names(ignoring)} {_do(ignoring, 'do')} not honour {words}.", True)
        elif len(groups) > 1:
            told = "; ".join(f"{value} by {_names(names)}" for value, names in groups)
            yield Difference(what, f"{words} is {told}.", False)


def _streams(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    apart = [name for name, probes in by_name.items() if probes.stream_equals_whole is False]
    if apart:
        yield Difference("stream", f"{_names(apart)}: the answer streamed is another than the answer whole.", True)


def _told(by_name: Mapping[str, Probes]) -> Iterator[Difference]:
    sampling = _groups({name: probes.sampling for name, probes in by_name.items() if probes.sampling})
    if len(sampling) > 1:
        told = "; ".join(f"{_names(names)}: {value}" for value, names in sampling)
        sentence = f"Without sampling fields: {told}. Every measured request says temperature 0."
        yield Difference("sampling_defaults", sentence, False)
    kinds: tuple[tuple[str, str, Callable[[Probes], bool]], ...] = (
        ("usage", "usage in streams", lambda probes: probes.has_stream_usage),
        ("cached_tokens", "cached tokens", lambda probes: probes.has_cached_tokens),
    )
    for what, words, of in kinds:
        silent = [name for name, probes in by_name.items() if not of(probes)]
        if silent and len(silent) < len(by_name):
            yield Difference(what, f"{_names(silent)} {_do(silent, 'tell')} no {words}.", False)


def _numbered(
    by_name: Mapping[str, Probes], of: Callable[[Probes], Sequence[Any]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each probe's number from 1, and what each candidate gave to it."""
    for at in range(max(len(of(probes)) for probes in by_name.values())):
        yield at + 1, {name: of(probes)[at] for name, probes in by_name.items() if at < len(of(probes))}


def _groups(values: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    """Return the values there are, each with the names that have it, the first name's first."""
    found: dict[Any, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return list(found.items())


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _do(names: Sequence[str], verb: str) -> str:
    """Return the verb as it goes with one name or with several."""
    if len(names) > 1:
        return verb
    return "does" if verb == "do" else f"{verb}s"
