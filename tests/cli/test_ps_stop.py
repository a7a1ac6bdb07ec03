"""`localllm ps` and `stop`: which servers there are, and that a stopped one is gone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from localllm.cli import ps as ps_verb
from localllm.cli import stop as stop_verb
from localllm.errors import Unavailable
from localllm.worker import registry
from localllm.worker.registry import ServerRecord
from tests.cli.conftest import Opened, Result
from tests.conftest import PROJECT
from tests.fake_engine import fake_service
from tests.server.fakes import FakeWorker
from tests.worker.local import FileSupervisor, listening, supervisor_of

Cli = Callable[..., Result]


@contextmanager
def serving(model: Path, *argv: str, step_ms: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server over the fake engine; yields its process and its URL."""
    env = {**os.environ, "LOCALLLM_FAULTS": "1", "LOCALLLM_ENGINE": "tests.fake_engine:parts"}
    env |= {"PYTHONPATH": str(PROJECT), "FAKE_STEP_MS": str(step_ms), "FAKE_NO_EOS": "1"}
    command = [sys.executable, "-m", "localllm", "serve", str(model), "--port", "0", *argv]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"listening on (\S+)", line):
                    yield process, found[1]
                    break
            else:
                raise AssertionError(said)
        finally:
            process.kill()


def wait_ready(cli: Cli) -> None:
    """Wait until the model of the only server is loaded."""
    give_up_s = time.monotonic() + 20
    while [m["state"] for m in cli("ps", "--json").json()["servers"][0]["models"]] != ["ready"]:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_no_server_is_no_failure(cli: Cli) -> None:
    assert cli("ps") == Result(0, "", "no server of yours is running (localllm serve)\n")
    assert cli("ps", "--json") == Result(0, '{"servers": []}\n', "")


def test_models_are_listed_with_their_state(cli: Cli, tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path / "m.gguf")
    supervisor.last_used_s = time.time() - 130
    with listening(supervisor):
        lines = cli("ps").out.splitlines()
        (server,) = cli("ps", "--json").json()["servers"]
    assert re.split(r"\s\s+", lines[0])[:6] == ["MODEL", "STATE", "SIZE", "KV IN RAM", "REQUESTS", "LAST USED"]
    assert re.split(r"\s\s+", lines[1]) == [
        *("fake", "ready", "2.0 MB", "0 B", "0", "2 min ago", "4242", "http://127.0.0.1:8080")
    ]
    assert server["models"][0]["kept"]["ram_bytes"] == 0
    assert (server["pid"], server["problem"], server["models"][0]["name"]) == (os.getpid(), None, "fake")


def test_looking_at_a_model_is_no_use_of_it(cli: Cli, tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path / "m.gguf")
    with listening(supervisor):
        supervisor.refuses["fake"] = Unavailable("It was used.")
        assert cli("ps").out.splitlines()[1].split()[4:6] == ["0", "B"]
        [model] = cli("cache", "stats", "--json").json()["models"]
        assert model["model"] == "fake"
        assert cli("cache", "clear").code == 0


def test_a_model_that_does_not_answer_is_listed(cli: Cli, tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path / "m.gguf")
    supervisor.fakes["fake"].fails["stats"] = Unavailable("It hangs.")
    with listening(supervisor):
        assert re.split(r"\s\s+", cli("ps").out.splitlines()[1])[2:4] == ["2.0 MB", "-"]


def test_models_that_are_only_stored_are_left_to_ls(cli: Cli, tmp_path: Path) -> None:
    supervisor = FileSupervisor(stored=("elsewhere",))
    with listening(supervisor):
        assert "elsewhere" not in cli("ps").out
        assert "no model is loaded" in cli("ps").out


def test_a_name_cannot_steer_the_terminal(cli: Cli, tmp_path: Path) -> None:
    worker = FakeWorker("bad\x1b[2J", fake_service(), model={"path": str(tmp_path / "m")})
    (tmp_path / "m").touch()
    with listening(FileSupervisor(worker)):
        assert "\x1b" not in cli("ps").out


def test_a_server_that_does_not_answer_is_listed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_verb, "TIMEOUT_S", 0.1)
    own = registry.register("http://127.0.0.1:9", tmp_path / "none.sock")
    result = cli("ps")
    assert (result.code, "No server answers" in result.out) == (0, True)
    own.close()


def test_stop_without_a_server_is_unreachable(cli: Cli) -> None:
    result = cli("stop")
    assert (result.code, "No server of yours" in result.err) == (6, True)


def test_several_servers_have_to_be_told_apart(cli: Cli, tmp_path: Path) -> None:
    owns = [registry.register(f"http://127.0.0.1:{port}", tmp_path / str(port)) for port in (8080, 9090)]
    result = cli("stop")
    assert (result.code, "Several servers" in result.err) == (2, True)
    for wanted in ("9090", "127.0.0.1:9090", "http://127.0.0.1:9090/"):
        assert stop_verb.choose(wanted).url == "http://127.0.0.1:9090"
    none = cli("stop", "7070")
    assert (none.code, "http://127.0.0.1:8080, http://127.0.0.1:9090" in none.err) == (6, True)
    for own in owns:
        own.close()


def test_what_a_server_computed_is_found_after_a_restart(cli: Cli, opened: Opened, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(tiny / "llama-dense.gguf", tmp_path))
    ask = ("run", str(model), "Be kind to everyone who asks, " * 5, "-n", "3", "--raw")
    with serving(model) as (process, _):
        wait_ready(cli)
        assert cli(*ask).code == 0
        assert cli(*ask, "--private", "-f", str(private_text(tmp_path))).code == 0
        assert cli("stop").code == 0
        process.wait(20)
    with serving(model):
        wait_ready(cli)
        again = cli(*ask, "--json").json()
        assert again["usage"]["cached_tokens"]["disk"] == again["usage"]["prompt_tokens"] - 1
        private = cli(*ask, "-f", str(private_text(tmp_path)), "--json").json()
        assert sum(private["usage"]["cached_tokens"].values()) <= again["usage"]["prompt_tokens"] + 1  # what is common
        assert private["usage"]["prompt_tokens"] > 2 * again["usage"]["prompt_tokens"]
    assert opened.calls == []


def private_text(folder: Path) -> Path:
    """Write what is said in private."""
    path = folder / "private.txt"
    path.write_text("nobody but us two may ever know of this. " * 10)
    return path


def test_a_server_is_served_listed_used_and_stopped(cli: Cli, opened: Opened, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copy(tiny / "llama-dense.gguf", tmp_path))
    with serving(model) as (process, url):
        wait_ready(cli)
        (server,) = cli("ps", "--json").json()["servers"]
        assert (server["pid"], server["url"]) == (process.pid, url)
        workers = psutil.Process(process.pid).children()
        assert [worker.pid for worker in workers] == [server["models"][0]["pid"]]
        used = cli("run", str(model), "hi", "-n", "5", "--stats", "--raw")
        assert (used.code, opened.calls) == (0, []), used
        assert f"through the server at {url}" in used.err
        model.touch()
        changed = cli("run", str(model), "hi", "-n", "5", "--stats", "--raw")
        assert "does not hold that model" in changed.err
        assert "its file has changed since" in cli("ps").err
        stopped = cli("stop", "--json")
        assert (stopped.code, stopped.json()["pid"]) == (0, process.pid), stopped
        assert process.wait(5) == 0
        assert not any(worker.is_running() for worker in workers)
        assert os.listdir(registry.runtime_folder()) == []
        assert cli("ps").out == ""


def test_a_killed_server_leaves_neither_worker_nor_record(cli: Cli, opened: Opened, tiny: Path) -> None:
    model = tiny / "llama-dense.gguf"
    with serving(model, step_ms=20) as (process, _):
        wait_ready(cli)
        workers = psutil.Process(process.pid).children()
        script = f"import time, os; time.sleep(0.5); os.kill({process.pid}, {int(signal.SIGKILL)})"
        with subprocess.Popen([sys.executable, "-c", script]):
            result = cli("run", str(model), "hi", "--raw", "-n", "3000")
        assert (result.code, "is gone" in result.err) == (6, True), result
        process.wait(5)
        give_up_s = time.monotonic() + 3
        while any(worker.is_running() for worker in workers):
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        assert registry.running() == []
        assert os.listdir(registry.runtime_folder()) == []


def test_a_stop_lets_a_running_answer_end_or_tells_it(cli: Cli, opened: Opened, tiny: Path) -> None:
    model = tiny / "llama-dense.gguf"
    with serving(model, "--drain-timeout", "1", step_ms=20) as (process, _):
        wait_ready(cli)
        stop = "subprocess.run([sys.executable, '-m', 'localllm', 'stop'])"
        script = f"import time, subprocess, sys; time.sleep(0.4); {stop}"
        with subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT):
            result = cli("run", str(model), "hi", "--raw", "-n", "3000", "--json")
        assert process.wait(10) == 0
    assert result.code == 1
    assert result.json()["error"]["code"] == "draining"


def test_a_server_that_does_not_listen_is_told_how_to_end(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_verb, "CALL_TIMEOUT_S", 0.1)
    own = registry.register("http://127.0.0.1:9", tmp_path / "none.sock")
    result = cli("stop")
    own.close()
    assert (result.code, f"kill {os.getpid()}" in result.err) == (6, True)


def test_a_server_that_takes_too_long_is_told(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_verb, "WAIT_S", 0.1)
    with listening(supervisor_of(tmp_path / "m.gguf")) as local:
        result = cli("stop")
        assert local.stops == ["stop"]
    assert (result.code, "still ending its answers" in result.err) == (124, True)


def test_a_process_that_took_the_number_of_a_dead_server_is_not_waited_for(tmp_path: Path) -> None:
    gone = ServerRecord(os.getpid(), 1.0, "http://127.0.0.1:9", tmp_path / "s", "0", tmp_path / "gone.json")
    assert not stop_verb.is_there(gone)
