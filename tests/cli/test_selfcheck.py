"""`localllm selfcheck`: a sound server passes, each fault is found in its layer, and nothing is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from localllm.cli import own_server, selfcheck_steps
from localllm.cli.selfcheck_steps import SelfCheck, Step
from tests.cli.conftest import Result
from tests.conftest import PROJECT

Cli = Callable[..., Result]
LAYERS = ["installation", "model", "start", "network", "answer", "without cache", "stop", "memory", "left over"]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Every check must leave no process and no file."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    before = set(psutil.Process().children())
    yield None
    assert set(psutil.Process().children()) - before == set()
    assert os.listdir(folder) == []


@pytest.fixture
def model(tiny: Path) -> Path:
    return tiny / "llama-dense.gguf"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_FAULTS", "1")
    monkeypatch.setenv("LOCALLLM_ENGINE", "tests.fake_engine:parts")


def checked(model: Path, fault: str) -> list[Step]:
    """Check a server that does one thing wrong."""
    command = [sys.executable, "-m", "tests.cli.bad_server", fault]
    return list(SelfCheck(str(model), lambda path: command).run())


def failed(steps: list[Step]) -> dict[str, str]:
    return {step.layer: step.told for step in steps if not step.ok}


def test_a_sound_server_passes_every_layer(cli: Cli, model: Path, fake_engine: None) -> None:
    result = cli("selfcheck", str(model), "--json")
    told = result.json()
    assert [step["layer"] for step in told["steps"]] == LAYERS, told
    assert (result.code, told["ok"], told["failed"]) == (0, True, None), told
    facts = {step["layer"]: step["facts"] for step in told["steps"]}
    assert len(facts["model"]["sha256"][0]) == 64
    assert facts["installation"]["llama-cpp-python"]
    assert all(host.startswith(("127.", "::1")) for host in facts["network"]["listening"])
    assert facts["answer"]["text"] == facts["without cache"]["text"]
    assert facts["without cache"]["cached_tokens"] == 0
    assert 0 < facts["answer"]["first_token_s"] <= facts["answer"]["total_s"]
    assert facts["stop"]["exit_code"] == 0
    assert facts["left over"]["n_processes_seen"] >= 2


def test_none_of_the_users_settings_reach_its_server(
    cli: Cli, model: Path, fake_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text('host = "0.0.0.0"\nqueue = 1\n')
    monkeypatch.setenv("LOCALLLM_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("LOCALLLM_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("LOCALLLM_STRICT", "1")
    result = cli("selfcheck", str(model))
    assert (result.code, result.out.splitlines()[-1]) == (0, "all is well"), result


def test_a_model_that_is_not_here_is_told_as_elsewhere(cli: Cli, tmp_path: Path) -> None:
    result = cli("selfcheck", str(tmp_path / "none.gguf"))
    assert result.code == 3
    assert "FAILED  model" in result.out
    assert result.out.endswith("failed: model\n")
    assert "hint: " in result.err


@pytest.mark.parametrize(
    ("fault", "layer", "told"),
    [
        ("does not start", "start", "there is no room for it"),
        ("dies while loading", "start", "the model is broken"),
        ("never loads", "start", "it is broken"),
        ("open to all", "network", "0.0.0.0"),
        ("a second port", "network", "it listens on"),
        ("open socket", "network", "666"),
        ("refuses", "answer", "HTTP 400"),
        ("breaks off", "answer", "broke off"),
        ("fails late", "answer", "too late"),
        ("says nothing", "answer", "empty"),
        ("another answer", "without cache", "another answer"),
        ("caches", "without cache", "7 tokens came from the cache"),
        ("ends badly", "stop", "code 5"),
        ("leaves a process", "left over", "processes are left"),
        ("leaves a file", "left over", "files are left: tmp/"),
        ("leaves its socket", "left over", "s.sock"),
    ],
)
def test_a_fault_is_found_in_its_layer(model: Path, fault: str, layer: str, told: str) -> None:
    steps = checked(model, fault)
    assert next(iter(failed(steps))) == layer, steps
    assert told in failed(steps)[layer]
    left = [pid for step in steps for pid in step.facts.get("processes", [])]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if fault != "does not start":
        assert [step.layer for step in steps][-3:] == ["stop", "memory", "left over"]


def test_a_server_that_does_not_stop_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck_steps, "STOP_TIMEOUT_S", 0.2)
    steps = checked(model, "does not stop")
    assert next(iter(failed(steps))) == "stop"


def test_a_server_that_never_listens_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "LISTEN_TIMEOUT_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    steps = list(SelfCheck(str(model), lambda path: command).run())
    assert "did not listen" in failed(steps)["start"]


def test_a_check_that_is_interrupted_leaves_nothing(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localllm", "selfcheck", str(model)]
    env = {**os.environ, "TMPDIR": str(tmp_path / "t"), "LOCALLLM_FAULTS": "1", "PYTHONPATH": str(PROJECT)}
    env |= {"LOCALLLM_ENGINE": "tests.fake_engine:parts", "FAKE_STEP_MS": "300"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ok      network"):
                break
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 130
    assert below
    give_up_s = time.monotonic() + 5
    while any(child.is_running() for child in below):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
