"""`localllm pull`: what it says, where, and how each failure ends."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.fake_hub import FakeHub, Fault, gguf_bytes

Cli = Callable[..., Result]
REPO = "org/model-GGUF"
DATA = gguf_bytes(600_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add(REPO, {"model-Q4_K_M.gguf": DATA}, license="apache-2.0")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_last_line_names_model_quantisation_and_hash(cli: Cli, hub: FakeHub) -> None:
    result = cli("pull", f"hf:{REPO}")
    assert (result.code, result.out) == (0, "")
    last = result.err.splitlines()[-1]
    assert last == f"pulled {REPO}:Q4_K_M, Q4_K_M, 600 kB, sha256 {SHA256}"


def test_log_stays_short_and_carries_no_terminal_codes(cli: Cli, hub: FakeHub) -> None:
    err = cli("pull", f"hf:{REPO}").err
    assert len(err.splitlines()) <= 10
    assert "\x1b" not in err
    assert "\r" not in err


def test_json_is_one_document_on_stdout(cli: Cli, hub: FakeHub) -> None:
    facts = cli("pull", f"hf:{REPO}", "--json").json()
    assert (facts["quant"], facts["sha256"], facts["size_bytes"]) == ("Q4_K_M", SHA256, len(DATA))
    assert (facts["license"], facts["revision"]) == ("apache-2.0", hub.commit(REPO))
    assert Path(facts["path"]).read_bytes() == DATA


def test_quiet_says_nothing(cli: Cli, hub: FakeHub) -> None:
    assert cli("pull", f"hf:{REPO}", "-q") == Result(0, "", "")


def test_second_pull_fetches_nothing_and_says_so(cli: Cli, hub: FakeHub) -> None:
    cli("pull", f"hf:{REPO}")
    sent = hub.sent_bytes()
    result = cli("pull", f"hf:{REPO}")
    assert result.code == 0
    assert result.err.splitlines()[-1].startswith("already here: ")
    assert hub.sent_bytes() == sent


@pytest.mark.parametrize(
    ("ref", "code", "hint"),
    [
        ("hf:org/none", 3, "check the spelling"),
        ("nothing-like-this", 3, "localllm pull"),
        ("./here.gguf", 2, "localllm run"),
        ("hf:only-one-part", 2, "localllm pull"),
        ("", 2, "localllm ls"),
    ],
)
def test_what_cannot_be_pulled_is_refused_with_the_next_command(
    cli: Cli, hub: FakeHub, ref: str, code: int, hint: str
) -> None:
    result = cli("pull", ref)
    assert (result.code, result.out) == (code, "")
    error, last = result.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert hint in last


def test_wrong_bytes_end_with_8_and_never_become_a_model(cli: Cli, hub: FakeHub) -> None:
    hub.faults["cdn"] = [Fault("flip", at=300_000)]
    assert cli("pull", f"hf:{REPO}").code == 8
    assert cli("ls", "--json").json()["models"] == []


def test_failure_is_a_document_under_json(cli: Cli, hub: FakeHub) -> None:
    result = cli("pull", "hf:org/none", "--json")
    assert result.code == 3
    assert result.json()["error"]["code"] == "model_not_found"


def run_pull(hub: FakeHub, home: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "LOCALLLM_HOME": str(home), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-m", "localllm", "pull", f"hf:{REPO}"]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_keeps_what_arrived_and_the_next_pull_takes_it_up(
    hub: FakeHub, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    hub.bytes_per_s = 150_000
    process = run_pull(hub, tmp_path)
    deadline = time.monotonic() + 20
    while hub.sent_bytes() < 100_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "interrupted; what arrived is kept" in err
    assert "Traceback" not in err
    hub.bytes_per_s = 0
    sent = hub.sent_bytes()
    again = run_pull(hub, tmp_path)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert "taking up an earlier try" in err
    assert hub.sent_bytes() - sent < len(DATA)


@pytest.mark.parametrize("width", [30, 45, 50, 60, 79, 80, 100, 200])
def test_bar_is_one_line_without_colour_at_any_width(width: int) -> None:
    from rich.console import Console

    from localllm.cli.pull import Bar, _bar
    from localllm.models.sources.progress import Phase, PullProgress

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True)
    progress = _bar(console)
    bar = Bar(progress, progress.add_task("", total=None))
    bar(PullProgress(Phase.FETCHING, "a-model-with-a-long-name-00001-of-00009.gguf\x1b[2J" * 2, 7 * 10**9, 48 * 10**9))
    console.print(progress.make_tasks_table(progress.tasks))
    (line,) = out.getvalue().rstrip("\n").split("\n")
    assert "7.0/48.0 GB" in line
    assert "\x1b[3" not in line
    assert "\x1b[2J" not in line
