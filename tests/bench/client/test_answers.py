from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.bench.client.answers import Answer, StreamFold, fold_body
from localllm.bench.client.http1 import EventSplitter, Malformed

FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def said(delta: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}


def stream(*chunks: Any, done: bool = True) -> Answer:
    fold = StreamFold()
    for number, chunk in enumerate(chunks):
        fold.take(float(number), b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()))
    if done:
        fold.take(float(len(chunks)), b"data: [DONE]")
    return fold.finished()


def whole(value: Any, status: int = 200) -> Answer:
    return fold_body(status, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.mark.parametrize("sent", [7, 7.0, "7", "7.0"])
def test_counts_are_read_in_any_spelling(sent: Any) -> None:
    usage = {
        "prompt_tokens": sent,
        "completion_tokens": sent,
        "prompt_tokens_details": {"cached_tokens": sent},
        "completion_tokens_details": {"accepted_prediction_tokens": sent, "rejected_prediction_tokens": sent},
    }
    for answer in (stream(said({"content": "a"}), FINISH, {"choices": [], "usage": usage}), whole({"usage": usage})):
        counts = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        assert counts == (7, 7, 7)
        assert (answer.accepted_draft_tokens, answer.rejected_draft_tokens) == (7, 7)


@pytest.mark.parametrize("sent", [None, True, -1, 1.5, "many", "nan", 1e300, [], {}])
def test_what_is_no_count_was_not_told(sent: Any) -> None:
    usage = {
        "prompt_tokens": sent,
        "completion_tokens": sent,
        "prompt_tokens_details": sent,
        "completion_tokens_details": {"accepted_prediction_tokens": sent},
    }
    answer = stream(said({"content": "a"}), FINISH, {"choices": [], "usage": usage})
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (None, None, None)
    assert (answer.accepted_draft_tokens, answer.rejected_draft_tokens) == (None, None)
    assert answer.faults == []


@pytest.mark.parametrize("usage", [None, [], "x", 3, {}])
def test_a_good_answer_without_usage_is_a_good_answer(usage: Any) -> None:
    answer = stream(said({"content": "a"}, usage=usage), FINISH)
    assert (answer.faults, answer.text, answer.completion_tokens) == ([], "a", None)


def test_drafts_are_read_from_llama_servers_timings() -> None:
    answer = stream(said({"content": "a"}), {**FINISH, "timings": {"draft_n": 12, "draft_n_accepted": 9, "cache_n": 4}})
    assert (answer.accepted_draft_tokens, answer.rejected_draft_tokens, answer.cached_tokens) == (9, 3, 4)


def test_counts_once_told_are_not_forgotten() -> None:
    first = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    answer = stream(said({"content": "a"}, usage=first), FINISH, {"choices": [], "usage": {"completion_tokens": 2}})
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (5, 2, 3)


@pytest.mark.parametrize(
    ("delta", "text", "n_pieces", "calls"),
    [
        ({"content": "a"}, "a", 1, False),
        ({"content": None}, "", 0, False),
        ({"content": ""}, "", 0, False),
        ({"role": "assistant"}, "", 0, False),
        ({"content": 3}, "", 0, False),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", 1, False),
        ({"content": [{"type": "thinking", "thinking": [{"text": "hm"}]}]}, "", 1, False),
        ({"content": [None, 3, "x"]}, "", 0, False),
        ({"refusal": "no"}, "no", 1, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, "", 1, True),
        ({"tool_calls": {"not": "a list"}}, "", 1, True),
        ({"tool_calls": []}, "", 0, False),
        ({"tool_calls": None, "content": "a", "audio": 3, "unknown": [[[{}]]]}, "a", 1, False),
        (None, "", 0, False),
        ([], "", 0, False),
        ("text", "", 0, False),
    ],
)
def test_what_a_delta_says(delta: Any, text: str, n_pieces: int, calls: bool) -> None:
    answer = stream(said(delta), FINISH)
    assert (answer.text, len(answer.token_s), answer.tool_calls, answer.faults) == (text, n_pieces, calls, [])


def test_a_text_completion_says_text() -> None:
    answer = stream({"choices": [{"text": "a", "index": 0}]}, {"choices": [{"text": "", "finish_reason": "stop"}]})
    assert (answer.text, answer.faults, answer.token_s) == ("a", [], [0.0])


def test_thoughts_and_the_answer_in_one_piece_begin_the_answer() -> None:
    answer = stream(said({"reasoning_content": "hm"}), said({"reasoning": "so", "content": "yes"}), FINISH)
    assert (answer.token_s, answer.answer_s, answer.text) == ([0.0, 1.0], 1.0, "yes")


@pytest.mark.parametrize("reason", ["", None])
def test_an_empty_finish_reason_is_none_yet(reason: Any) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": reason}]}
    assert stream(chunk, chunk, FINISH).faults == []


@pytest.mark.parametrize("choices", [None, {}, 3, "x", [None], [3], [[]], [{}], [{"index": None, "delta": 3}]])
def test_choices_of_any_type_say_nothing(choices: Any) -> None:
    answer = stream({"choices": choices}, FINISH)
    assert (answer.faults, answer.token_s) == ([], [])
    assert whole({"choices": choices}).text == ""


def test_halves_of_a_surrogate_pair_are_one_character() -> None:
    answer = stream(
        rb'{"choices":[{"delta":{"content":"\ud83d"}}]}', rb'{"choices":[{"delta":{"content":"\ude00"}}]}', FINISH
    )
    assert (answer.text, answer.faults) == ("\N{GRINNING FACE}", [])
    alone = stream(rb'{"choices":[{"delta":{"content":"\ud83d"}}]}', FINISH)
    assert alone.text.encode()  # can be written


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ({"message": "no", "code": "queue_full", "type": "x"}, "queue_full", "no"),
        ({"message": "no", "code": None, "type": "x"}, "x", "no"),
        ({"message": "no", "code": 400}, "400", "no"),
        ({"message": {"a": 1}}, "", "{'a': 1}"),
        ({"code": 1}, "1", ""),
        ("model not found", None, "model not found"),
        (["a"], None, "['a']"),
        (True, None, "True"),
    ],
)
def test_errors_of_any_shape_are_errors(error: Any, code: str | None, message: str) -> None:
    refused, broken_off = whole({"error": error}, 400), stream(said({"content": "a"}), {"error": error}, done=False)
    for answer in (refused, broken_off):
        assert (answer.terminals, answer.faults) == (["error"], [])
        assert (answer.error_code, answer.error_message) == (code, message)


def test_an_error_without_a_cover_is_an_error() -> None:
    answer = whole({"object": "error", "message": "no such model", "code": 404}, 404)
    assert (answer.terminals, answer.error_code, answer.error_message) == (["error"], "404", "no such model")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"detail": "Not Found"}, "Not Found"),
        ({"message": "gone"}, "gone"),
        ({"detail": [{"loc": ["body"], "msg": "too long"}, {"msg": "no model"}, 7]}, "too long; no model"),
        (b"404 page not found", "404 page not found"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"", ""),
        ([], "[]"),
    ],
)
def test_a_refusal_in_no_known_shape_still_tells_its_words(body: Any, message: str) -> None:
    answer = whole(body, 404)
    assert (answer.faults, answer.error_message) == (["status 404 without an error"], message)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{not json", "malformed"),
        (b"[]", "no JSON object"),
        (b"3", "no JSON object"),
        (b"", "truncated"),
        (b'"\xff"', "UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":', "truncated"),
    ],
)
def test_what_is_no_json_object_is_told_in_a_sentence(data: bytes, reason: str) -> None:
    for answer in (stream(data, FINISH), whole(data)):
        assert len(answer.faults) == 1
        assert reason in answer.faults[0]


def test_numbers_that_json_has_not_hurt_nothing_else() -> None:
    answer = stream(b'{"choices":[{"delta":{"content":"a"},"logprobs":NaN}],"x":-Infinity}', FINISH)
    assert (answer.text, answer.faults) == ("a", [])


@pytest.mark.parametrize("rest", [b"data: [DONE]", b"data:[DONE]"])
def test_a_last_line_without_its_break_is_an_end(rest: bytes) -> None:
    fold = StreamFold()
    fold.take(0.0, b"data: " + json.dumps(FINISH).encode())
    assert fold.finished(rest).terminals == ["done"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("n_bytes", [1, 3, 10_000])
def test_a_stream_means_the_same_however_it_is_spelled_and_cut(newline: bytes, n_bytes: int) -> None:
    text = (
        b": a comment\n\n"
        b'data:{"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'event: message\nid: 7\nretry: 10\ndata: {"choices":[\ndata: {"delta":{"content":"b"}}]}\n\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n: within\n\n'
        b"data: [DONE] \n\n"
    ).replace(b"\n", newline)
    splitter, fold = EventSplitter(), StreamFold()
    for start in range(0, len(text), n_bytes):
        for event in splitter.feed(text[start : start + n_bytes]):
            fold.take(1.0, event)
    answer = fold.finished(splitter.rest)
    assert (answer.text, answer.faults, answer.terminals, answer.n_comments) == ("ab", [], ["done"], 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["7", "stop"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "message", "content", "index", "usage", "error", "timings", "x"]),
            inner,
            max_size=4,
        )
        | st.dictionaries(
            st.sampled_from(["finish_reason", "tool_calls", "text", "code", "draft_n", "prompt_tokens"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(JSON, max_size=4), status=st.sampled_from([200, 404]))
def test_nothing_that_is_json_raises(values: list[Any], status: int) -> None:
    answer = stream(*values)
    answer.text.encode()
    answer.error_message.encode()
    for value in values:
        whole(value, status).text.encode()
        stream({"choices": value, "usage": value, "timings": value}).text.encode()


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60), status=st.sampled_from([200, 404]))
def test_nothing_that_is_bytes_raises(data: bytes, status: int) -> None:
    fold_body(status, data)
    stream(data)
    splitter = EventSplitter()
    try:
        events = splitter.feed(data)
    except Malformed:
        return
    fold = StreamFold()
    for event in events:
        fold.take(0.0, event)
    fold.finished(splitter.rest)
