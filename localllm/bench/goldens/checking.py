"""Compares what a model answers now with what its golden keeps, and says what moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

DRIFT_NATS = 0.8
"""Logprobs that differ by at most this are the same within drift.

As far as other threads, batch shapes or attention kernels move them, all being right; another quantisation of
weights or cache moves them further: docs/decisions/016-what-a-golden-takes-for-the-same.md.
"""


class Move(Enum):
    """What can move, in the order in which one causes the next."""

    REFUSAL = "refusal"
    PROMPT = "prompt tokens"
    TEXT = "text"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """What became of one prompt. `moves`: () = the same, but for `drift_nats`, or refused as before.

    `prompt_at`, `text_at`: the first token that differs. `gap_nats`: by how much the token taken then
    led the next there. `drift_nats`: the largest difference of a logprob while both read the same;
    None where the prompt itself differs.
    """

    name: str
    moves: tuple[Move, ...]
    sentence: str
    prompt_at: int | None = None
    text_at: int | None = None
    gap_nats: float | None = None
    drift_nats: float | None = None
    is_refused: bool = False

    def document(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {
            "name": self.name,
            "moved": [move.value for move in self.moves],
            "refused": self.is_refused,
            "sentence": self.sentence,
            "prompt_at": self.prompt_at,
            "text_at": self.text_at,
            "gap_nats": self.gap_nats,
            "drift_nats": self.drift_nats,
        }


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> PromptCheck:
    """Return what moved between two entries of the same prompt (see `recording.take`)."""
    name = old["name"]
    if old["refused"] or new["refused"]:
        return _refusal(name, old["refused"], new["refused"])
    prompt_at = _first_difference(old["prompt_ids"], new["prompt_ids"])
    if prompt_at is not None:
        sentence = f"prompt tokens moved at {prompt_at} of {len(old['prompt_ids'])} (template or tokenizer)"
        moves = (Move.PROMPT, Move.TEXT) if old["answer"] != new["answer"] else (Move.PROMPT,)
        return PromptCheck(name, moves, sentence, prompt_at, _first_difference(old["ids"], new["ids"]))
    text_at, drift = _first_difference(old["ids"], new["ids"]), _drift_nats(old, new)
    gap = None if text_at is None else _gap_nats(old, text_at)
    found = [Move.TEXT] if text_at is not None or old["answer"] != new["answer"] else []
    found += [Move.LOGPROBS] if drift > DRIFT_NATS else []
    sentence = _sentence(text_at, gap, drift, found, len(old["ids"]))
    return PromptCheck(name, tuple(found), sentence, None, text_at, gap, drift)


def _refusal(name: str, old: str, new: str) -> PromptCheck:
    if old and new:
        return PromptCheck(name, (), f"refused, as before: {new}", is_refused=True)
    sentence = f"refused now: {new}" if new else f"answered now; it was refused: {old}"
    return PromptCheck(name, (Move.REFUSAL,), sentence, is_refused=bool(new))


def _sentence(
    text_at: int | None, gap_nats: float | None, drift_nats: float, moves: Sequence[Move], n_tokens: int
) -> str:
    within = f"logprobs within {drift_nats:.2g} nats"
    beyond = f"logprobs moved by up to {drift_nats:.2g} nats (drift is up to {DRIFT_NATS:g})"
    logprobs = beyond if Move.LOGPROBS in moves else within
    if text_at is not None:
        where = "" if gap_nats is None else f", where the two likeliest were {gap_nats:.2g} nats apart"
        is_near = gap_nats is not None and gap_nats <= DRIFT_NATS and Move.LOGPROBS not in moves
        near = " (a near tie, which drift decides)" if is_near else ""
        return f"text moved at token {text_at} of {n_tokens}{where}{near}; {logprobs}"
    if Move.TEXT in moves:
        return f"the same tokens, written as another text; {logprobs}"
    return "same" if drift_nats == 0 else logprobs if moves else f"same, {within}"


def _first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    """Return where two lists part; None where they are equal."""
    for at, (before, now) in enumerate(zip(old, new, strict=False)):
        if before != now:
            return at
    return None if len(old) == len(new) else min(len(old), len(new))


def _drift_nats(old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """Return the largest difference at the places that both read the same tokens up to."""
    text_at = _first_difference(old["ids"], new["ids"])
    n_places = None if text_at is None else text_at + 1
    pairs = zip(old["logprobs"][:n_places], new["logprobs"][:n_places], strict=False)
    return max((_place_drift(dict(before), dict(now)) for before, now in pairs), default=0.0)


def _place_drift(old: Mapping[int, float], new: Mapping[int, float]) -> float:
    """Return the largest difference at one place; a token that one side does not list is at most its least."""
    both = [abs(old[token] - new[token]) for token in old.keys() & new.keys()]
    left = [old[token] - min(new.values()) for token in old.keys() - new.keys()]
    come = [new[token] - min(old.values()) for token in new.keys() - old.keys()]
    return max(0.0, *both, *left, *come)


def _gap_nats(entry: Mapping[str, Any], at: int) -> float | None:
    """Return by how much the likeliest token led the next at a place."""
    if at >= len(entry["logprobs"]):
        return None
    best = sorted((logprob for _, logprob in entry["logprobs"][at]), reverse=True)
    return best[0] - best[1] if len(best) > 1 else None
