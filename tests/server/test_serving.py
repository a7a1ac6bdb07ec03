"""`localllm serve` as a process: signals, draining, exit codes, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from localllm.server import serving
from localllm.server.state import ServerSettings
from localllm.worker.supervisor import SupervisorSettings
from tests.conftest import PROJECT
from tests.server.fakes import wait_until

LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000, "stream": True}


FAKE = {
    "LOCALLLM_FAULTS": "1",
    "LOCALLLM_ENGINE": "tests.fake_engine:parts",
    "FAKE_NO_EOS": "1",
    "FAKE_STEP_MS": "5",
}


class Server:
    """One `localllm serve` with folders of its own, over a fake engine unless a model is given."""

    def __init__(
        self, folder: Path, *arguments: str, model: Path | None = None, fake_engine: bool = True, is_named: bool = True
    ) -> None:
        self.folder = folder
        if model is None and is_named:
            model = folder / "model.gguf"
            model.write_bytes(b"GGUF: the fake engine reads nothing of it")
        named = [] if model is None else [str(model)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCALLLM_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "localllm", "serve", *named, "--port", "0", *arguments],
            cwd=folder,
            env={
                **environment,
                **(FAKE if fake_engine else {}),
                "LOCALLLM_HOME": str(folder / "home"),
                "XDG_RUNTIME_DIR": str(folder),
                "TMPDIR": str(folder),
                "PYTHONPATH": str(PROJECT),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def ready(self) -> Server:
        """Wait until it listens and its model is loaded."""
        wait_until(lambda: "loaded in" in self.log or self.process.poll() is not None, 30)
        found = LISTENING.search(self.log)
        assert found, self.log
        self.port = int(found[1])
        return self

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def post(self, body: Any) -> http.client.HTTPResponse:
        connection = self.connection()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float = 10) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.workers(), psutil.Process(self.process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def begin(*arguments: str) -> Server:
        servers.append(Server(tmp_path, *arguments))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


def read_stream(response: http.client.HTTPResponse) -> tuple[list[Any], bool]:
    """Read a stream to its end; return its data, and whether it ended as a whole one does."""
    try:
        body, is_whole = response.read().decode(), True
    except http.client.IncompleteRead as error:
        body, is_whole = error.partial.decode(), False
    data = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data], is_whole


def is_there(process: psutil.Process) -> bool:
    """Say whether a process runs still; one that nobody reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_of(server: Server, workers: list[psutil.Process]) -> list[str]:
    """Return what a server that is gone left: processes, its port, files that it made."""
    left = [f"process {worker.pid}" for worker in workers if is_there(worker)]
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
        left.append("port")
    kept = {"model.gguf", "home"}
    left += [str(p) for p in server.folder.rglob("*") if p.is_socket() or p.suffix == ".sock"]
    return left + [p.name for p in server.folder.iterdir() if p.name not in kept and not p.is_dir()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_drains_and_every_stream_ends_properly(start: Any, number: int, code: int) -> None:
    server = start("--drain-timeout", "1.5", "--parallel", "2").ready()
    workers = server.workers()
    long, short = server.post(CHAT), server.post({**CHAT, "max_tokens": 60})
    assert long.status == short.status == 200
    queued = server.connection()  # beyond what runs at once
    started_s = time.monotonic()
    server.process.send_signal(number)
    wait_until(lambda: "stopping" in server.log)
    refused = server.post(CHAT)
    assert refused.status == 503
    assert json.loads(refused.read())["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    data, is_whole = read_stream(short)
    assert data[-1] == "[DONE]"
    assert is_whole
    data, is_whole = read_stream(long)
    assert data[-1]["error"]["code"] == "draining"
    assert is_whole
    queued.close()
    assert server.wait() == code
    assert time.monotonic() - started_s < 3
    assert left_of(server, workers) == []
    assert "Traceback" not in server.log


def test_an_idle_server_stops_at_once(start: Any) -> None:
    server = start().ready()
    workers = server.workers()
    idle = server.connection()
    idle.request("GET", "/livez")
    idle.getresponse().read()
    started_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 143
    assert time.monotonic() - started_s < 2
    assert left_of(server, workers) == []


def test_a_second_signal_ends_it_now(start: Any) -> None:
    server = start("--drain-timeout", "30").ready()
    workers = server.workers()
    response = server.post(CHAT)
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in server.log)
    started_s = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    data, is_whole = read_stream(response)
    assert "error" in data[-1]
    assert is_whole
    assert server.wait() == 130
    assert time.monotonic() - started_s < 2
    assert left_of(server, workers) == []


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_a_signal_at_any_moment_of_the_start_ends_it(start: Any, after_s: float) -> None:
    server = start()
    time.sleep(after_s)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() in (143, -signal.SIGTERM)
    assert "Traceback" not in server.log


def test_an_engine_that_hangs_does_not_keep_it(start: Any) -> None:
    server = start("--drain-timeout", "1").ready()
    workers = server.workers()
    response = server.post(CHAT)
    for worker in workers:
        worker.suspend()
    started_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    data, is_whole = read_stream(response)
    assert data[-1]["error"]["code"] == "draining"
    assert is_whole
    assert server.wait() == 143
    assert time.monotonic() - started_s < 3
    assert left_of(server, workers) == []


def test_a_second_signal_ends_what_is_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SILENT_S", 0.05)

    class Supervisor:
        """Keeps for ever, unless it is hurried."""

        def __init__(self) -> None:
            self.hurried = asyncio.Event()

        def hurry(self) -> None:
            self.hurried.set()

        async def close(self) -> None:
            await self.hurried.wait()

    async def end(n_signals: int) -> list[str]:
        log, life = Log(), serving._Run(ServerSettings(), SupervisorSettings(), [], ())
        for _ in range(n_signals):
            life._stop(143)
        ending = asyncio.ensure_future(life._end(Supervisor(), log))  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert ending.done() is (n_signals > 1)
        life._stop(143)
        await asyncio.wait_for(ending, 5)
        return log.lines

    class Log:
        """Remembers."""

        def __init__(self) -> None:
            self.lines: list[str] = []

        def note(self, level: str, text: str) -> None:
            self.lines.append(text)

    assert asyncio.run(end(2)) == []
    [told] = asyncio.run(end(1))
    assert "another signal" in told


def test_a_worker_that_dies_is_an_error_event_and_then_a_good_answer(start: Any) -> None:
    server = start().ready()
    response = server.post(CHAT)
    while b'"content":"' not in response.readline():
        pass
    for worker in server.workers():
        worker.kill()
    data, is_whole = read_stream(response)
    assert data[-1]["error"]["code"] == "worker_died"
    assert is_whole
    again = server.post({**CHAT, "max_tokens": 5})
    assert again.status == 200
    assert read_stream(again)[0][-1] == "[DONE]"


def test_workers_are_gone_within_a_second_of_a_killed_server(start: Any) -> None:
    server = start().ready()
    workers = server.workers()
    assert workers
    server.post(CHAT)
    server.process.kill()
    server.wait()
    wait_until(lambda: not any(is_there(worker) for worker in workers), 1.0)


def test_a_taken_port_names_its_holder_and_is_exit_2(start: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        server = start("--port", str(holder.getsockname()[1]))
        assert server.wait(20) == 2
        assert f"(process {os.getpid()})" in server.log
        assert "Traceback" not in server.log


def test_an_unknown_model_is_exit_3(start: Any) -> None:
    server = start("no-such-model")
    assert server.wait(20) == 3
    assert "no-such-model" in server.log


def test_a_bad_certificate_is_a_sentence(start: Any, tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nothing")
    server = start("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    assert server.wait(20) == 2
    assert "certificate" in server.log
    assert "Traceback" not in server.log


def test_an_idle_server_sleeps(start: Any) -> None:
    server = start().ready()
    response = server.post({**CHAT, "max_tokens": 5})
    response.read()
    process = psutil.Process(server.process.pid)
    time.sleep(0.5)

    def switches() -> int:
        counted = process.num_ctx_switches()
        return counted.voluntary + counted.involuntary

    before = switches()
    time.sleep(2)
    assert switches() - before <= 10


def test_without_a_model_it_says_where_one_comes_from(tmp_path: Path) -> None:
    server = Server(tmp_path, is_named=False)
    try:
        wait_until(lambda: "there is no model here yet: localllm pull" in server.log, 30)
    finally:
        server.kill()


def test_a_certificate_that_is_none_is_told_plainly(start: Any, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    text = tmp_path / "home" / "note.txt"
    text.write_text("no certificate")
    server = start("--tls-cert", str(text), "--tls-key", str(text))
    assert server.wait(30) == 2
    assert "error: The certificate or its key is of no use: one of them is not PEM." in server.lines


def test_a_model_that_cannot_be_loaded_is_logged_with_the_way_out(tmp_path: Path, tiny: Path) -> None:
    server = Server(tmp_path, "--ctx", "1000000", model=tiny / "llama-dense.gguf", fake_engine=False)
    try:
        wait_until(lambda: "not loaded" in server.log, 30)
        assert re.search(r"trained for\. Hint: --ctx \d+$", server.log, re.MULTILINE), server.log
    finally:
        server.kill()


def test_the_log_is_json_where_asked_for(start: Any) -> None:
    server = start("--log-format", "json")
    wait_until(lambda: any("listening on" in line for line in server.lines), 30)
    lines = [json.loads(line) for line in server.lines]
    assert any(line["event"] == "note" and "listening on http" in line["text"] for line in lines)
