"""What the chat template tests share: the templates, their spellings, and the conversations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BOS, EOS = "<s>", "</s>"

NAMES = (
    "GLM-4.6",
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "LFM2.5-Instruct",
    "MiniMax-M2",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-4.0",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
)

CHAT: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be <b>kind</b> & 'brief'."},
    {"role": "user", "content": 'Hello "there"  '},
    {"role": "assistant", "content": "Hi\n\nyou — ü 😀"},
    {"role": "user", "content": "How are you?"},
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the <weather> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City 'name'", "enum": ["Paris", "Rom"]},
                    "days": {"type": "integer", "description": "Number of days", "default": 1},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags"},
                },
                "required": ["city"],
            },
        },
    },
)
CALL: dict[str, Any] = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <1>", "days": 3, "tags": ["a", "b"]}},
}
CALLED: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "What weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"temp": 20}'},
    {"role": "assistant", "content": "20 degrees."},
    {"role": "user", "content": "Thanks!"},
)


def source(shared: Path, name: str) -> str:
    """Return the text of one of the shared templates."""
    return (shared / "templates" / f"{name}.jinja").read_text("utf-8")


# Angle or square brackets with at most a few words inside, and the two odd families.
_SPELLED = re.compile(
    r"<[|｜/]?[A-Za-z_][\w▁:]*[|｜]?>|<\|\"\|>|<\|[\w]+>|<[\w]+\|>|\[/?[A-Z_]{3,}\]|\]~!b\[|\]~b\]|\[e~\[|\[gMASK\]"
)


def spellings(text: str) -> list[str]:
    """Return every spelling in a template that a vocabulary might hold as one token."""
    return sorted(set(_SPELLED.findall(text)))
