"""`localllm bench record` as a process: its sentences, its end, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from localllm.bench.workloads.trace import read_trace
from tests.cli.test_bench import Cli

ANSWER = {"choices": [{"index": 0, "message": {"content": "qqanswerzz"}, "finish_reason": "stop"}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(ANSWER | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}/v1"
    running.shutdown()
    thread.join()
    running.server_close()


@contextmanager
def recording(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Start the command; its process, its port and its output."""
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "localllm", "bench", "record", *arguments], stdout=out, stderr=out, text=True
        )
    try:
        deadline_s = time.monotonic() + 60
        while "-> " not in log.read_text() and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        found = log.read_text()
        yield process, int(found.partition("http://127.0.0.1:")[2].partition("/")[0] or 0), log
    finally:
        process.kill()
        process.wait()


def ask(port: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps({"messages": [{"role": "user", "content": "qqquestionzz"}], "user": "qquserzz"})
    headers = {"content-type": "application/json", "authorization": "Bearer qqkeyzz"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    assert json.loads(connection.getresponse().read())["choices"] == ANSWER["choices"]
    connection.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_a_count(tmp_path: Path, server: str, number: int, code: int) -> None:
    file = tmp_path / "trace.jsonl"
    with recording(tmp_path, server, "-o", str(file)) as (process, port, log):
        ask(port)
        ask(port)
        process.send_signal(number)
        assert process.wait(20) == code
    told = log.read_text()
    assert f"recording http://127.0.0.1:{port}/v1 -> {server}\n" in told
    assert f"2 requests recorded in {file}\n" in told
    assert "Traceback" not in told
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(read_trace(file).requests) == 2
    assert not [
        canary for canary in ("question", "answer", "user", "key") if f"qq{canary}zz" in told + file.read_text()
    ]


def test_a_kill_leaves_what_was_recorded(tmp_path: Path, server: str) -> None:
    file = tmp_path / "trace.jsonl"
    with recording(tmp_path, server, "-o", str(file), "--keep-text") as (process, port, log):
        ask(port)
        deadline_s = time.monotonic() + 20
        while not read_trace(file).requests and time.monotonic() < deadline_s:
            time.sleep(0.01)
        process.kill()
        process.wait()
    (kept,) = read_trace(file).requests
    assert kept.body["messages"][0]["content"] == "qqquestionzz"
    assert "written down as they are" in log.read_text()


def test_a_file_that_is_there_is_refused(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("mine")
    done = cli("bench", "record", "http://127.0.0.1:1", "-o", str(file))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {file} is there already.\nhint: name another file with -o\n"
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://127.0.0.1", "no address of a server"),
        ("http://me:secret@127.0.0.1", "An address holds no key"),
        ("http://127.0.0.1:99999", "no address of a server"),
    ],
)
def test_an_address_that_is_none_is_refused(cli: Cli, tmp_path: Path, url: str, why: str) -> None:
    done = cli("bench", "record", url, "-o", str(tmp_path / "trace"))
    assert done.code == 2
    assert why in done.err
    assert not (tmp_path / "trace").exists()


def test_it_needs_a_file(cli: Cli) -> None:
    done = cli("bench", "record", "http://127.0.0.1:1")
    assert done.code == 2
    assert "--output" in done.err
    assert os.environ.get("LOCALLLM_OUTPUT") is None
