"""A request a line, without its text, and without waiting for whoever reads the log."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from typing import Any

import pytest

from localllm.runtime.events import Admitted, Done, Error, Finished, Token, Usage
from localllm.server.record import RequestRecord
from localllm.server.request_log import RequestLog, facts_of


def a_record() -> RequestRecord:
    record = RequestRecord("r-1", "/v1/chat/completions", client="key:ab12", model="smollm2:135m", started_s=10.0)
    record.code, record.is_stream, record.ipc_ms = 200, True, 1.25
    record.see([Admitted(5, {"device": 2}, 1, 9)], 10.1)
    record.see([Token(0, "SECRET", (1,))], 10.2)
    record.see([Token(0, "SECRET", (2,)), Finished(0, "stop", "SECRET")], 10.25)
    record.see([Usage(5, 2, {"device": 2}, timings_ms={"queue": 3.0}), Done()], 10.25)
    record.end(10.3)
    return record


def lines_of(log_format: Any, *records: RequestRecord, notes: tuple[str, ...] = ()) -> list[str]:
    out = io.StringIO()
    log = RequestLog(log_format, out)
    for record in records:
        log.write(record)
    for note in notes:
        log.note("warning", note)
    log.close()
    return out.getvalue().splitlines()


def test_json_lines_hold_ids_counts_codes_and_times() -> None:
    (line,) = lines_of("json", a_record())
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "method": "POST",
        "route": "/v1/chat/completions",
        "code": 200,
        "model": "smollm2:135m",
        "client": "key:ab12",
        "stream": True,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 2,
        "queue_ms": 3.0,
        "ttft_ms": pytest.approx(200),
        "itl_ms": pytest.approx(50),
        "itl_max_ms": pytest.approx(50),
        "ipc_ms": 1.25,
        "total_ms": pytest.approx(300),
    }


def test_text_lines_hold_the_same_facts_a_line_each() -> None:
    first, second = lines_of("text", a_record(), a_record())
    assert " info event=request request_id=r-1 method=POST route=/v1/chat/completions code=200 " in first
    assert "stream=yes" in second
    assert len(first.split(" ")) == len(facts_of(a_record())) + 2


def drain(reader: int, into: list[bytes]) -> threading.Thread:
    """Read a pipe to its end, in a thread."""

    def read() -> None:
        with open(reader, "rb") as source:
            into.append(source.read())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_text_of_a_request_is_logged(log_format: Any) -> None:
    failed = a_record()
    failed.see([Error("worker_died", "SECRET", "SECRET", details={"field": "SECRET"})], 10.4)
    page = "\n".join(lines_of(log_format, a_record(), failed))
    assert "SECRET" not in page
    assert "worker_died" in page


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_note_is_one_line_whatever_is_in_it(log_format: Any) -> None:
    lines = lines_of(log_format, notes=("one\ntwo\r\nthree", "four"))
    assert len(lines) == 2
    assert "warning" in lines[0]


def test_odd_names_cannot_forge_a_line_or_a_field() -> None:
    record = a_record()
    record.model = 'm code=500\n2026 info event=request "x'
    (line,) = lines_of("text", record)
    assert line.count(" code=") == 2  # one of them inside quotes
    assert '"m code=500\\n2026 info event=request \\"x"' in line


def test_a_full_pipe_holds_nobody_up_and_dropped_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.server.request_log._MAX_WAITING_LINES", 50)
    reader, writer = os.pipe()
    read: list[bytes] = []
    with open(writer, "w") as out:
        log = RequestLog("json", out)
        started_s = time.monotonic()
        for _ in range(2000):  # about 800 kB into a pipe that nobody reads
            log.write(a_record())
        assert time.monotonic() - started_s < 5
        draining = drain(reader, read)
        log.close(timeout_s=10)
    draining.join()
    lines = [json.loads(line) for line in read[0].splitlines()]
    told = [int(line["text"].split()[0]) for line in lines if line["event"] == "note"]
    assert sum(line["event"] == "request" for line in lines) + sum(told) == 2000
    assert sum(told) > 0


def test_a_log_whose_reader_is_gone_is_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    log = RequestLog("text", out)
    for _ in range(3):
        log.write(a_record())
    log.close()
    assert not log._writer.is_alive()
    with pytest.raises(BrokenPipeError):
        out.close()


def test_closing_does_not_wait_for_a_reader_that_stands_still() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as out:
        log = RequestLog("json", out)
        for _ in range(2000):
            log.write(a_record())
        started_s = time.monotonic()
        log.close(timeout_s=0.2)
        assert time.monotonic() - started_s < 2
        draining = drain(reader, [])  # lets the writing thread end
        log.close(timeout_s=10)
        assert not log._writer.is_alive()
    draining.join()


def test_an_idle_log_does_nothing() -> None:
    log = RequestLog("text", io.StringIO())
    try:
        assert log._writer.is_alive()
        assert log._lines.empty()
    finally:
        log.close()
        log.close()
    assert not log._writer.is_alive()
