"""The probe requests: the same for every candidate, each small, none with anything of the user's in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from localllm.bench.workloads.ask import Ask, Message


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


PLAIN_CHATS: Final = 3
"""So many of CHATS hold nothing but ordinary text, as every workload does; the last spells control tokens."""
CHATS: Final[tuple[tuple[Message, ...], ...]] = (
    (_said("system", "You are a careful assistant. Answer in one sentence."), _said("user", "Why is the sky blue?")),
    (
        _said("user", "My name is Ada and I have two cats."),
        _said("assistant", "Nice to meet you, Ada. What are the names of your cats?"),
        _said("user", "  Miso and Tofu.\n\nHow many letters do both names have together?  "),
        _said("assistant", "Miso has four and Tofu has four: eight."),
        _said("user", "Thank you!"),
    ),
    (_said("user", "Übersetze „Grüße“ ins Französische — 日本語でも。 Спасибо! 🙂 x² ≤ ½"),),
    (_said("user", "What do <|im_start|>system, <|im_end|>, </s> and <|endoftext|> stand for?"),),
)

GREEDY: Final = (
    "Write two sentences about a lighthouse.",
    "Go on with this list, numbers and commas only: 2, 4, 6, 8, 10, 12,",
    "Copy this line exactly: the grey cat sat on the red mat; the red mat lay on the grey cat",
    "Explain in simple words how a bicycle stays upright.",
)
"""Two that leave the choice of words, two that leave none: there a penalty for repeating shows at once."""
GREEDY_TOKENS: Final = 24
N_ALTERNATIVES: Final = 5
NEAR_TIE: Final = 0.5
"""Nats. Sums in another order (other kernels, batches, neighbours in the cache) move a logit by 0.3 to 0.8."""

SAMPLED: Final = "Invent a name for a ship and say where it sails."
SAMPLED_TOKENS: Final = 16
N_SAMPLED: Final = 3

NUMBER: Final = r"-?\d+"
EXACT: Final = (
    ("What is 7 + 5? Answer with the number alone.", NUMBER, "12"),
    ("What is 9 - 4? Answer with the number alone.", NUMBER, "5"),
    ("Which is larger, 3 or 8? Answer with the number alone.", NUMBER, "8"),
    ("Is fire hot? Answer yes or no.", "yes|no", "yes"),
    ("Is snow black? Answer yes or no.", "yes|no", "no"),
    ("Repeat this word and nothing else: lantern", r"\w+", "lantern"),
    ("Repeat this number and nothing else: 4711", NUMBER, "4711"),
    ("Which of these is a colour: table, red, seven? Answer with one word.", "table|red|seven", "red"),
    ("What is the capital of France? Answer with one word.", "paris|lyon|london|berlin", "paris"),
    ("Which letter comes after B in the alphabet? Answer with one letter.", "[a-z]", "c"),
)
"""A question, what an answer to it looks like, the right one. Of several numbers the last is the answer."""
EXACT_TOKENS: Final = 12

LONG: Final = "Count from one to thirty, in words."
LIMIT_TOKENS: Final = 5

SHORT: Final = ("Say yes.", "What is 2 + 2? Answer with the number alone.", "Name the capital of France in one word.")
"""Their answers end early, with most models."""
FILLED_TOKENS: Final = 32


class Colour(msgspec.Struct, forbid_unknown_fields=True):
    """An answer that nobody gives who does not follow the schema."""

    colour: str
    shades: int


def json_ask() -> Ask:
    """Return a question whose answer is to be JSON; nothing in its text says so."""
    return Ask("probe", 96, messages=(_said("user", "Which colour has the sky?"),), answer_type=Colour)


def tool_ask(choice: str) -> Ask:
    """Return a greeting with a tool on offer, which no model would call unless it must."""
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    weather = {"name": "get_weather", "description": "Tell the weather in a city.", "parameters": parameters}
    tool = {"type": "function", "function": weather}
    return Ask("probe", 48, messages=(_said("user", "Good morning!"),), tools=(tool,), tool_choice=choice)
