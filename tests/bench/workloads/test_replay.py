"""Traces: read with bounds, replayed as they were sent, refused with the line at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.bench.workloads.parse import parse_workload
from localllm.bench.workloads.replay import replay
from localllm.bench.workloads.trace import Header, Recorded, line_of, read_trace
from localllm.errors import UsageError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEADER = line_of(Header(localllm_trace=1, began_at="2026-01-01T00:00:00+00:00", texts="filler"))


def request(at_s: float = 0.0, content: Any = "Hello", **more: Any) -> Recorded:
    body = more.pop("body", {"messages": [{"role": "user", "content": content}], "temperature": 1, "stream": True})
    fields: dict[str, Any] = {
        "at_s": at_s,
        "path": CHAT,
        "body": body,
        "status": 200,
        "ended": "answer",
        "duration_s": 1.0,
        "prompt_tokens": 10,
        "completion_tokens": 7,
    }
    return Recorded(**{**fields, **more})


def write(path: Path, *lines: Recorded | bytes) -> Path:
    path.write_bytes(HEADER + b"".join(line if isinstance(line, bytes) else line_of(line) for line in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_requests_are_asked_in_the_order_in_which_they_were_sent(file: Path) -> None:
    workload = replay(write(file, request(5.5, "third"), request(2.0, "first"), request(3.25, "second")))
    sessions = list(workload.sessions(1))
    assert [len(session) for session in sessions] == [1, 1, 1]
    assert [session[0].at_s for session in sessions] == [0.0, 1.25, 3.5]
    assert [session[0].messages[0]["content"] for session in sessions] == ["first", "second", "third"]
    assert workload.is_trace
    assert list(workload.sessions(2)) == sessions


def test_the_spec_is_the_file(file: Path, tmp_path: Path) -> None:
    spec = replay(write(file, request())).spec
    assert spec.startswith("replay:")
    assert len(spec) == len("replay:") + 12
    assert replay(write(tmp_path / "same", request())).spec == spec
    assert replay(write(tmp_path / "other", request(content="Else"))).spec != spec


@pytest.mark.parametrize("tools", [[None], [1], ["x"], [{"type": "function", "function": None}], [{"function": "f"}]])
def test_what_is_no_tool_is_not_sent_again(tools: list[Any], file: Path) -> None:
    damaged = request(1, body={"messages": [{"role": "user", "content": "x"}], "tools": tools})
    workload = replay(write(file, request(), damaged))
    assert [len(list(ask.salted("s").messages)) for (ask,) in workload.sessions(1)] == [1]
    assert workload.facts["n_left_out"] == 1


def test_a_line_nested_too_deeply_is_named(file: Path) -> None:
    line = b'{"body": ' + b"[" * 5000 + b"\n"
    with pytest.raises(UsageError, match="line 3 is no recorded request"):
        read_trace(write(file, request(), line))
    file.write_bytes(line)
    with pytest.raises(UsageError, match="is no trace"):
        read_trace(file)


def test_answers_are_as_long_as_they_were(file: Path) -> None:
    cut = request(1, ended="cancelled", completion_tokens=None, n_pieces=3)
    asks = [session[0] for session in replay(write(file, request(), cut)).sessions(1)]
    assert [(ask.max_tokens, ask.is_free) for ask in asks] == [(7, True), (3, True)]
    assert not asks[0].extra


@pytest.mark.parametrize(
    "failed",
    [
        request(ended="refused", status=429, completion_tokens=None),
        request(ended="broken"),
        request(ended="broken", status=None),
        request(completion_tokens=0),
        request(completion_tokens=None),
        request(body={"messages": []}),
        request(body={"messages": "text"}),
        request(path=TEXT, body={"prompt": [1, 2]}),
        request(path=TEXT, body={"prompt": ""}),
        request(path=TEXT, body={}),
    ],
)
def test_requests_that_failed_are_left_out_and_told(file: Path, failed: Recorded) -> None:
    workload = replay(write(file, failed, request(1)))
    assert len(list(workload.sessions(1))) == 1
    assert workload.facts["n_left_out"] == 1
    with pytest.raises(UsageError, match="no request that was answered"):
        replay(write(file, failed))


def test_what_forms_the_answer_goes_along(file: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_object"},
        "stop": ["x"],
        "top_p": 0.5,
    }
    ((ask,),) = replay(write(file, request(body=body))).sessions(1)
    assert ask.messages[0]["content"] == "a\nb"
    assert ask.extra == {"response_format": body["response_format"], "tool_choice": body["tool_choice"]}
    assert ask.tools
    assert not ask.is_free
    assert ask.tool_choice is None
    assert ask.salted("s").messages[0]["content"] == "[s] a\nb"


def test_text_completions_and_suffixes_go_along(file: Path) -> None:
    body = {"prompt": ["def f("], "suffix": "return"}
    ((ask,),) = replay(write(file, request(path=TEXT, body=body))).sessions(1)
    assert (ask.prompt, ask.suffix, ask.messages) == ("def f(", "return", ())


def test_facts_tell_lengths_and_sharing(file: Path) -> None:
    system = {"role": "system", "content": "s" * 1000}
    bodies = [{"messages": [system, {"role": "user", "content": str(n)}]} for n in range(4)]
    facts = replay(write(file, *(request(n, body=body) for n, body in enumerate(bodies)))).facts
    assert facts["n_requests"] == 4
    assert facts["duration_s"] == 3
    assert facts["texts"] == "filler"
    assert facts["answer_tokens"] == {"min": 7, "median": 7, "max": 7, "sum": 28}
    assert 0.65 < facts["shared_prefix_share"] < 0.75


def test_a_line_that_a_kill_cut_is_left_out_and_told(file: Path) -> None:
    write(file, request(), request(1))
    file.write_bytes(file.read_bytes()[:-20])
    workload = replay(file)
    assert workload.facts["is_cut"]
    assert len(list(workload.sessions(1))) == 1


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (b"not json\n", "line 3 is no recorded request"),
        (b"\n", "line 3 is no recorded request"),
        (b"\xff\xfe\n", "line 3 is no recorded request"),
        (b'{"at_s":1}\n', "line 3 is no recorded request"),
        (line_of(request()).replace(b'"at_s":0.0', b'"at_s":"secret"'), "line 3 is no recorded request"),
        (line_of(request(path="/v1/embeddings")), "line 3 is no request that can be sent again"),
        (line_of(request(-1.0)), "line 3 is no request that can be sent again"),
        (line_of(request()).replace(b'"ended":"answer"', b'"ended":"secret"'), "line 3 is no recorded request"),
    ],
)
def test_a_bad_line_is_named_and_not_quoted(file: Path, line: bytes, place: str) -> None:
    write(file, request(), line)
    with pytest.raises(UsageError, match=place) as caught:
        read_trace(file)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is empty"),
        (b"hello\n", "is no trace"),
        (b'{"localllm_bench_serve":1}\n', "is no trace"),
        (b'{"localllm_trace":2,"began_at":"","texts":"kept"}\n', "version 2; this reads version 1"),
    ],
)
def test_what_is_no_trace_is_refused(file: Path, text: bytes, why: str) -> None:
    file.write_bytes(text)
    with pytest.raises(UsageError, match=why):
        replay(file)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            replay(path)


def test_the_workload_is_found_by_its_spelling(file: Path) -> None:
    assert parse_workload(f"replay:{write(file, request())}").spec == replay(file).spec
