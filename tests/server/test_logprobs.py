"""Both shapes of log-probabilities, at their edges."""

from __future__ import annotations

import json
import math

from localllm.runtime.events import TokenLogprob
from localllm.server.logprobs import LEAST, CompletionLogprobs, of_chat, spelled

FOX = "🦊".encode()


def test_minus_infinity_is_a_number_that_json_can_tell() -> None:
    token = TokenLogprob(1, b"a", -math.inf, (TokenLogprob(1, b"a", -math.inf), TokenLogprob(2, b"b", -0.5)))
    chat = of_chat([token])
    assert chat["content"][0]["logprob"] == LEAST
    assert [other["logprob"] for other in chat["content"][0]["top_logprobs"]] == [LEAST, -0.5]
    completion = CompletionLogprobs().of([token])
    assert completion["token_logprobs"] == [LEAST]
    json.dumps([chat, completion], allow_nan=False)


def test_bytes_of_a_cut_character_are_exact() -> None:
    entries = of_chat([TokenLogprob(i, FOX[i : i + 1], -1.0) for i in range(4)])["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == FOX
    assert all(entry["token"] == "\ufffd" for entry in entries)


def test_offsets_go_on_over_parts_and_start_where_told() -> None:
    told = CompletionLogprobs(n_before=10)
    first = told.of([TokenLogprob(1, b"ab", -1.0), TokenLogprob(2, FOX[:2], -1.0)])
    second = told.of([TokenLogprob(3, FOX[2:], -1.0), TokenLogprob(4, b"c", -1.0)])
    assert first["text_offset"] == [10, 12]
    assert second["text_offset"] == [12, 13]


def test_tokens_that_look_alike_as_text_stay_apart() -> None:
    alike = (TokenLogprob(1, b"\xf0", -1.0), TokenLogprob(2, b"\xf1", -2.0))
    told = CompletionLogprobs().of([TokenLogprob(1, b"\xf0", -1.0, alike)])
    assert told["top_logprobs"] == [{"bytes:\\xf0": -1.0, "bytes:\\xf1": -2.0}]
    assert spelled(b"ok") == "ok"
