"""`localllm bench init` and `bench run`: what is printed, what is written, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import localllm.cli.bench.contract as command
from localllm.bench.contract.file import parse_contract
from localllm.bench.contract.shipped import NAMES
from localllm.errors import LocalLLMError, ModelNotFound, ServerUnreachable
from tests.bench.contract.stand_ins import TWO, FakeRuns, FakeTools
from tests.cli.conftest import Result

Cli = Callable[..., Result]
PROJECT = Path(__file__).resolve().parents[2]
RULE = '[[rule]]\ncandidate = "A"\nmeasure = "ttft_p50"\nat_most = "{}"\n'


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    """Let nothing be started, and no model be looked for."""
    fake = FakeTools()
    monkeypatch.setattr(command, "RealTools", lambda *_: fake)
    monkeypatch.setattr(command, "find_models", lambda contract: {})
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contract(folder: Path, more: str = "", *, rounds: int = 2) -> Path:
    path = folder / "contract.toml"
    path.write_text(TWO.format(rounds=rounds) + more)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_contract_is_valid_as_it_stands(cli: Cli, folder: Path, name: str) -> None:
    done = cli("bench", "init", name)
    assert (done.code, done.err) == (0, "")
    found = parse_contract(done.out.encode(), source=name, folder=folder)
    assert len(found.candidates) > 1
    assert found.rules
    assert found.rounds >= 5


def test_init_alone_prints_one_for_the_default_model_with_every_server_named(cli: Cli) -> None:
    done = cli("bench", "init")
    assert done.out == cli("bench", "init", "start").out
    assert tomllib.loads(done.out)["model"][0]["reference"] == "smollm2:135m"
    for server in ("llama-server", "Ollama", "vLLM", "LM Studio", "SGLang"):
        assert f'# name = "{server}"' in done.out


def test_what_is_commented_out_is_valid_too(cli: Cli, folder: Path) -> None:
    lines = cli("bench", "init").out.splitlines()
    starts = ("# [[", "# name", "# model", "# command", "# best", "# variables", "# serves", "# url")
    text = "\n".join(line.removeprefix("# ") if line.startswith(starts) else line for line in lines)
    found = parse_contract(text.encode(), source="start", folder=folder)
    assert len(found.candidates) == 8


def test_a_shipped_contract_that_is_none_is_named_with_those_there_are(cli: Cli) -> None:
    done = cli("bench", "init", "mainframe")
    assert done.code == 2
    assert "start, apple-laptop, nvidia-workstation" in done.err


def test_run_writes_three_files_and_the_markdown(cli: Cli, folder: Path, tools: FakeTools) -> None:
    done = cli("bench", "run", str(contract(folder)))
    assert done.code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        *("contract-result.html", "contract-result.json", "contract-result.md", "contract.toml")
    ]
    assert done.out == (folder / "contract-result.md").read_text()
    assert done.out.startswith("# A against B")
    document = json.loads((folder / "contract-result.json").read_text())
    assert document["localllm_bench_contract"] == 1
    assert document["contract_sha256"]
    assert not document["partial"]
    assert "contract-result.json" in done.err


@pytest.mark.parametrize("given", ["out/x", "out/x.json", "out/x.md", "out/x.html"])
def test_output_names_all_three_files(cli: Cli, folder: Path, tools: FakeTools, given: str) -> None:
    (folder / "out").mkdir()
    assert cli("bench", "run", str(contract(folder)), "-o", given, "-q").err == ""
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["x.html", "x.json", "x.md"]


def test_json_goes_to_stdout_whole(cli: Cli, folder: Path, tools: FakeTools) -> None:
    done = cli("bench", "run", str(contract(folder)), "--json")
    assert done.json() == json.loads((folder / "contract-result.json").read_text())


def test_an_output_that_cannot_be_written_is_found_before_anything_is_measured(
    cli: Cli, folder: Path, tools: FakeTools
) -> None:
    done = cli("bench", "run", str(contract(folder)), "-o", "nowhere/x.json")
    assert done.code == 2
    assert tools.log == []


def test_a_rule_that_does_not_hold_is_exit_code_10(cli: Cli, folder: Path, tools: FakeTools) -> None:
    done = cli("bench", "run", str(contract(folder, RULE.format("9ms") + RULE.format("11ms"))))
    assert done.code == 10
    assert "1 of 2 rules do not hold; the first: A: ttft_p50 at most 9 ms" in done.err
    assert "it is 10 ms" in done.err
    assert (folder / "contract-result.html").exists()


def test_a_mistake_in_the_contract_is_exit_code_2_with_its_line(cli: Cli, folder: Path, tools: FakeTools) -> None:
    done = cli("bench", "run", str(contract(folder, RULE.format("fast"))))
    assert done.code == 2
    assert "error: contract.toml, line " in done.err
    assert tools.log == []


def test_a_model_that_is_not_there_is_exit_code_3_with_its_line(cli: Cli, folder: Path) -> None:
    path = contract(folder)
    path.write_text(path.read_text().replace('reference = "smollm2:135m"', 'file = "no.gguf"'))
    done = cli("bench", "run", str(path))
    assert done.code == 3
    assert "contract.toml, line 10, model 1:" in done.err
    assert "no.gguf" in done.err


def test_a_file_of_another_hash_or_quantisation_is_refused(cli: Cli, folder: Path, tiny: Path) -> None:
    model = sorted(tiny.glob("*.gguf"))[0]
    path = contract(folder)
    text = path.read_text()
    path.write_text(text.replace('reference = "smollm2:135m"', f'file = "{model}"\nsha256 = "{"0" * 64}"'))
    assert cli("bench", "run", str(path)).code == 8
    path.write_text(text.replace('reference = "smollm2:135m"', f'file = "{model}"\nquant = "Q9_X"'))
    done = cli("bench", "run", str(path))
    assert done.code == 3
    assert "the contract says Q9_X" in done.err


def test_neither_file_nor_name_is_a_sentence(cli: Cli, folder: Path) -> None:
    done = cli("bench", "run", "no-such")
    assert done.code == 2
    assert "There is no file no-such, and no contract of that name is shipped" in done.err


def test_a_shipped_name_runs_without_a_file(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(asked: Any) -> Any:
        raise ModelNotFound(asked.title)

    monkeypatch.setattr(command, "find_models", found)
    done = cli("bench", "run", "apple-laptop")
    assert done.code == 3
    assert "Qwen3 4B Instruct on an Apple laptop" in done.err


def test_nothing_started_is_the_exit_code_of_the_first_that_failed(cli: Cli, folder: Path, tools: FakeTools) -> None:
    tools.fails = lambda name, n: ServerUnreachable(f"{name} is deaf")
    done = cli("bench", "run", str(contract(folder, RULE.format("1s"))))
    assert done.code == 6
    assert "error: A is deaf" in done.err
    assert json.loads((folder / "contract-result.json").read_text())["passed"] is False


def test_ctrl_c_in_a_run_keeps_what_there_is(cli: Cli, folder: Path, tools: FakeTools) -> None:
    def press(runs: FakeRuns, n: int) -> None:
        if (runs.name, n) == ("B", 1):
            os.kill(os.getpid(), signal.SIGINT)

    tools.on_run = press
    done = cli("bench", "run", str(contract(folder)))
    assert done.code == 130
    assert "interrupted" in done.err
    document = json.loads((folder / "contract-result.json").read_text())
    assert document["partial"]
    assert [cell["candidate"] for cell in document["cells"]] == ["A", "B"]
    assert document["cells"][1]["rounds"][0]["partial"]
    assert (folder / "contract-result.html").exists()
    assert tools.log[-1] == "stop B"


def test_ctrl_c_while_a_server_starts_keeps_what_there_is(cli: Cli, folder: Path, tools: FakeTools) -> None:
    def fails(name: str, n: int) -> None:
        if (name, n) == ("B", 2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

    tools.fails = fails
    done = cli("bench", "run", str(contract(folder)))
    assert done.code == 130
    assert json.loads((folder / "contract-result.json").read_text())["partial"]
    assert tools.n_runs == {"A": 1}


def test_the_key_is_taken_out_of_the_environment_that_candidates_get(
    cli: Cli, folder: Path, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Any] = []

    def made(contract: Any, models: Any, key: Any) -> FakeTools:
        keys.append(key)
        return tools

    monkeypatch.setattr(command, "RealTools", made)
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret-enough")
    assert cli("bench", "run", str(contract(folder))).code == 0
    assert keys == ["secret-enough"]
    assert "LOCALLLM_API_KEY" not in os.environ


SERVED = """version = 1
title = "Ours, computing nothing"
[run]
rounds = 1
requests = 400
warmup = 0
[[model]]
name = "m"
file = "{model}"
[[candidate]]
name = "ours"
command = ["localllm", "serve", "{{model}}", "--port", "{{port}}"]
variables = {{ LOCALLLM_FAULTS = "1", LOCALLLM_ENGINE = "tests.fake_engine:parts", FAKE_STEP_MS = "2" }}
[[workload]]
use = "chat:turns=1,answer=8"
"""


@pytest.fixture
def started(folder: Path, tiny: Path) -> Iterator[subprocess.Popen[str]]:
    """A `bench run` of our own server on an engine that computes nothing; nothing of it is left."""
    path = folder / "contract.toml"
    path.write_text(SERVED.format(model=sorted(tiny.glob("*.gguf"))[0]))
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "bench", "run", str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        tree = _tree(process.pid)
        for each in tree:
            each.kill()
        process.communicate()
        assert not [each for each in tree if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_servers_and_keeps_the_result(
    started: subprocess.Popen[str], folder: Path, number: signal.Signals, code: int
) -> None:
    result = folder / "contract-result.json"
    _until(result.exists)  # the candidate was examined: its round begins
    _until(lambda: any("--port" in each.cmdline() for each in _tree(started.pid) if each.pid != started.pid))
    servers = [each for each in _tree(started.pid) if each.pid != started.pid]
    started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert started.returncode == code, err
    assert json.loads(result.read_text())["partial"]
    assert out.startswith("# Ours, computing nothing")
    _until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in servers))


def _until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    give_up_s = time.monotonic() + seconds
    while not _holds(what):
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def _holds(what: Callable[[], bool]) -> bool:
    try:
        return what()
    except psutil.Error:
        return False


def test_a_result_that_cannot_be_written_goes_to_stdout_all_the_same(
    cli: Cli, folder: Path, tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise LocalLLMError("Cannot write contract-result.json: No space left on device.")

    monkeypatch.setattr("localllm.cli.bench.destination.Destination.write", full)
    done = cli("bench", "run", str(contract(folder)), "--json")
    assert done.code == 1
    assert not done.json()["partial"]
    assert done.err.count("note: Cannot write") == 1
    assert "error: Cannot write" in done.err


def test_part_of_a_shipped_contracts_name_is_told_the_whole(cli: Cli, folder: Path) -> None:
    done = cli("bench", "run", "apple")
    assert done.code == 2
    assert "there are apple-laptop, nvidia-workstation" in done.err
    assert "hint: localllm bench run apple-laptop" in done.err
