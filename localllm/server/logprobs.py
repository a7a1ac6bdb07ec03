"""Log-probabilities in OpenAI's two shapes: of chat, and the older one of completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Any, Final

from localllm.runtime.events import TokenLogprob

LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot tell."""


def of_chat(logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`, an entry a token."""
    content = [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "id": token.id,
        "token": token.raw.decode("utf-8", "replace"),
        "logprob": _finite(token.logprob),
        "bytes": list(token.raw),
    }


class CompletionLogprobs:
    """The older shape of one choice, whole or in parts: `{tokens, token_logprobs, top_logprobs, text_offset}`.

    Offsets count characters of the answer's text, after `n_before` characters that stand before it.
    """

    def __init__(self, n_before: int = 0) -> None:
        self._n_chars = n_before
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the entries of the next tokens."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in logprobs:
            told["tokens"].append(spelled(token.raw))
            told["token_logprobs"].append(_finite(token.logprob))
            best = {spelled(other.raw): _finite(other.logprob) for other in token.top}
            told["top_logprobs"].append(best | {spelled(token.raw): _finite(token.logprob)})
            told["text_offset"].append(self._start_of(token.raw))
        return told

    def _start_of(self, raw: bytes) -> int:
        """Return the character in which the next token begins, and count its own.

        One begun before, which the token does not go on with, turns out to be a replacement of its own.
        """
        begun = self._decoder.getstate()[0] + raw[:1]
        start = self._n_chars + max(0, len(begun.decode("utf-8", "replace")) - 1)
        self._n_chars += len(self._decoder.decode(raw))
        return start


def spelled(raw: bytes) -> str:
    """Return a token's text, or its bytes spelled out where they are no whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
