"""Both shapes of log-probabilities, at their edges."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

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


@pytest.mark.parametrize("cuts", [(1,), (2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)])
@pytest.mark.parametrize(
    "raw",
    [
        b"a\xf0\x9fb\xc3\xa9\xf0\xf0\x9f\xa6\x8az",
        b"\xe2\x82\x80\x80x\xed\xa0\x80\xef\xbf\xbd!",
        b"\xf0\x80\xf4\x90\xff\xc3(\xe2\x82\xe2\x82\xac",
    ],
)
def test_an_offset_is_where_its_token_begins_in_the_text_also_after_broken_characters(
    raw: bytes, cuts: tuple[int, ...]
) -> None:
    pieces = [raw[start:end] for start, end in pairwise((0, *cuts, len(raw))) if raw[start:end]]
    told = CompletionLogprobs().of([TokenLogprob(1, piece, -1.0) for piece in pieces])
    before = b""
    for piece, offset in zip(pieces, told["text_offset"], strict=True):
        begun = (before + piece[:1]).decode("utf-8", "replace")
        assert offset == len(begun) - 1  # the last of these is the character that the token begins in
        before += piece


def test_tokens_that_look_alike_as_text_stay_apart() -> None:
    alike = (TokenLogprob(1, b"\xf0", -1.0), TokenLogprob(2, b"\xf1", -2.0))
    told = CompletionLogprobs().of([TokenLogprob(1, b"\xf0", -1.0, alike)])
    assert told["top_logprobs"] == [{"bytes:\\xf0": -1.0, "bytes:\\xf1": -2.0}]
    assert spelled(b"ok") == "ok"
