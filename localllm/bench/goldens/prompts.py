"""The prompts of goldens: short and long, chat and plain text, several scripts, code, digits, structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions, GenerationRequest

_N_DAYS = 28


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: chat `messages` (of role and content), or `text` to go on from as it is."""

    name: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def request(self, options: GenerationOptions, *, can_chat: bool) -> GenerationRequest:
        """Return the request that it is; messages become plain text for a model without a chat template."""
        if self.messages and not can_chat:
            return CompletionRequest("\n\n".join(text for _, text in self.messages), options)
        if self.messages:
            return ChatRequest(tuple({"role": role, "content": text} for role, text in self.messages), options)
        return CompletionRequest(self.text, options)

    def document(self) -> dict[str, Any]:
        """Return it as a golden keeps it."""
        return {"name": self.name, "messages": [list(message) for message in self.messages], "text": self.text}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Prompt:
        """Return what a golden keeps."""
        messages = tuple((role, text) for role, text in document["messages"])
        return cls(document["name"], messages, document["text"])


def _user(text: str) -> tuple[tuple[str, str], ...]:
    return (("user", text),)


def _log() -> str:
    """Return a log that is longer than a batch of 512 tokens."""
    winds = ("north", "east", "south", "west")
    lines = (
        f"Day {day}: wind from the {winds[day * day % 4]}, {3 + day * 7 % 23} knots, {day * 5 % 17} ships in harbour."
        for day in range(1, _N_DAYS + 1)
    )
    return "\n".join(lines)


PROMPTS = (
    Prompt("english", _user("Explain in two sentences why the sky looks blue.")),
    Prompt("english, plain", text="The keeper of the lighthouse had not spoken to anyone for eleven days when"),
    Prompt("code", _user("Write a Python function that returns the n-th Fibonacci number.")),
    Prompt(
        "code, plain",
        text='def is_prime(n: int) -> bool:\n    """Tell whether `n` is a prime number."""\n    if n < 2:\n',
    ),
    Prompt("digits", text="17 * 23 = 391\n128 * 64 = 8192\n305 + 4096 = 4401\n99999 - 1 ="),
    Prompt("chinese", _user("用一句话解释海水为什么是咸的。")),
    Prompt("russian, plain", text="Однажды зимним вечером старый часовщик"),
    Prompt("mixed scripts", _user("Say it in English: मुझे चाय पसंद है। ☕ Grüße, naïve café, ʻokina, 👩\u200d🚀!")),
    Prompt("structure", text='{"name": "Ada", "languages": ["en", "fr"], "born": 1815}\n{"name": "Alan",'),
    Prompt("long", _user(f"This is a harbour's log.\n\n{_log()}\n\nOn which day was the wind strongest?")),
    Prompt(
        "system", (("system", "You are a pirate. Answer in one short sentence."), ("user", "What is two plus two?"))
    ),
    Prompt(
        "turns",
        (
            ("user", "My name is Mina and my dog is called Pixel."),
            ("assistant", "Nice to meet you, Mina! How old is Pixel?"),
            ("user", "He is three. What is my dog called?"),
        ),
    ),
)
