"""`localllm bench serve`: what it writes where, what is said of servers that cannot be measured, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

import localllm.bench.history
import localllm.cli.bench.serving as under_test
from localllm.bench.client.calibrate import Overhead
from localllm.cli.bench.destination import Destination
from localllm.errors import LocalLLMError, UsageError
from tests.bench.client.stand_in import Reply, Seen
from tests.bench.serving.rival import Rival, served
from tests.cli.conftest import Result
from tests.conftest import PROJECT

Cli = Callable[..., Result]
SHORT = ("--workload", "chat:turns=2,system=8,user=8,reply=8,answer=4", "--requests", "3", "--warmup", "1")


@pytest.fixture(autouse=True)
def overhead(monkeypatch: pytest.MonkeyPatch) -> Overhead:
    """Let the client's own overhead be known: measuring it takes seconds."""
    known = Overhead(0.1, 0.2, 0.1, 600)
    monkeypatch.setattr(under_test, "calibrate", lambda: known)
    return known


@pytest.fixture
def bench(cli: Cli) -> Callable[..., Result]:
    """Run `bench serve` with a workload that takes no time."""

    def run(url: str, *arguments: str) -> Result:
        return cli("bench", "serve", url, *SHORT, *arguments)

    return run


Bench = Callable[..., Result]


# --- what is written where


def test_stdout_is_the_table_and_stderr_is_quiet(bench: Bench) -> None:
    with served(Rival()) as url:
        result = bench(url)
    assert result.code == 0, result.err
    assert "localllm bench serve: small" in result.out
    assert re.search(r"Successful requests +3 +3", result.out)
    assert "cold" in result.out
    assert "warm" in result.out
    assert result.err == ""


def test_json_is_one_document_with_every_run(bench: Bench) -> None:
    with served(Rival(honours_ignore_eos=True)) as url:
        result = bench(url, "--json", "--slo", "ttft_p95=10s,error=0", "--seed", "7")
    document = result.json()
    assert document["localllm_bench_serve"] == 1
    assert document["partial"] is False
    assert [(run["cache"], run["load"]["concurrency"], run["completed"]) for run in document["runs"]] == [
        ("cold", 1, 3),
        ("warm", 1, 3),
    ]
    run = document["runs"][0]
    assert (run["seed"], run["answers"], run["n_warmup"], run["slo"]["met"]) == (7, "filled", 1, True)
    assert document["calibration"]["cpu_ms_per_token"] == 0.1
    assert document["fingerprint"]["server"]["models"] == ["small"]
    assert document["fingerprint"]["model"] == {"name": "small"}
    assert document["fingerprint"]["load_average_after"]


@pytest.mark.parametrize(
    ("name", "begins"), [("r.json", "{"), ("r", "{"), ("r.md", "#"), ("r.html", "<!"), ("R.HTML", "<!")]
)
def test_the_files_form_is_its_suffix(bench: Bench, tmp_path: Path, name: str, begins: str) -> None:
    with served(Rival()) as url:
        result = bench(url, "-o", str(tmp_path / name))
    assert (tmp_path / name).read_text().lower().startswith(begins)
    assert "Successful requests" in result.out
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_with_a_file_and_json_both_are_written(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with served(Rival()) as url:
        result = bench(url, "--json", "-o", str(file))
    assert result.json() == json.loads(file.read_text())


@pytest.mark.parametrize(("form", "begins"), [("md", "#"), ("html", "<!"), ("json", "{"), ("text", "=")])
def test_stdout_has_the_form_that_is_asked_for(bench: Bench, form: str, begins: str) -> None:
    with served(Rival()) as url:
        assert bench(url, "--format", form).out.lower().startswith(begins)


def test_a_finished_run_is_remembered(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(localllm.bench.history, "remember", lambda document, file: kept.append((document, file)))
    with served(Rival()) as url:
        bench(url, "-o", str(tmp_path / "r.json"))
    assert [(len(document["runs"]), file) for document, file in kept] == [(2, tmp_path / "r.json")]


def test_that_it_cannot_be_remembered_is_a_note(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(document: object, file: object) -> None:
        raise LocalLLMError("The disk is full.", "free some")

    monkeypatch.setattr(localllm.bench.history, "remember", full)
    with served(Rival()) as url:
        result = bench(url)
    assert result.code == 0
    assert "not kept for `localllm bench history`: The disk is full." in result.err


# --- refused before anything is measured


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json", "--format", "md"),
        ("--format", "csv"),
        ("--requests", "0"),
        ("--concurrency", "none"),
        ("--rate", "0"),
        ("--rate", "1", "--concurrency", "1"),
        ("--duration", "0"),
        ("--duration", "forever"),
        ("--slo", "ttft=1"),
        ("--workload", "poetry"),
        ("--workload", "chat:cache=hot"),
        ("--workload", "replay:no-such-file"),
        ("--api", "ollama"),
        ("--warmup", "-1"),
        ("-o", "no/such/folder/r.json"),
        ("-o", "."),
    ],
)
def test_what_makes_no_sense_asks_for_nothing(cli: Cli, arguments: tuple[str, ...]) -> None:
    rival = Rival()
    with served(rival) as url:
        result = cli("bench", "serve", url, *arguments)
    assert result.code == 2, result.err
    assert result.err.startswith("error: ")
    assert rival.paths == []


def test_a_read_only_place_is_found_before_measuring(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    rival = Rival()
    with served(rival) as url:
        result = bench(url, "-o", str(tmp_path / "r.json"))
    assert result.code == 2
    assert "Nothing can be written" in result.err
    assert rival.paths == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "r.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    Destination(link).write("new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    destination = Destination(file)
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(LocalLLMError, match="No space left"):
        destination.write("newer")
    assert file.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "r.json"]


def test_a_device_is_written_to_and_not_replaced() -> None:
    Destination(Path("/dev/null")).write("x")
    assert Path("/dev/null").is_char_device()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        Destination(tmp_path)


# --- servers that cannot be measured, or fail


async def _page(seen: Seen, reply: Reply) -> None:
    await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>")


def test_what_is_no_endpoint_exits_6_with_a_sentence_and_a_hint(bench: Bench) -> None:
    with served(_page) as url:
        result = bench(url, "--json")
    assert result.code == 6
    assert "is no OpenAI endpoint" in result.err
    assert "hint: " in result.err
    assert result.json()["error"]["code"] == "server_unreachable"


def test_nobody_there_exits_6(bench: Bench) -> None:
    result = bench("http://127.0.0.1:9")
    assert result.code == 6
    assert result.err.startswith("error: Nothing listens at http://127.0.0.1:9.\nhint: ")
    assert result.out == ""


def test_a_wrong_key_has_its_own_sentence_and_a_right_one_is_sent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(Rival(key="right-key", lists_to_anybody=True)) as url:
        assert "asks for a key" in bench(url).err
        monkeypatch.setenv("LOCALLLM_API_KEY", "wrong-key")
        result = bench(url)
        assert result.code == 6
        assert "does not take the key" in result.err
        monkeypatch.setenv("LOCALLLM_API_KEY", "right-key")
        assert bench(url).code == 0


def test_which_of_several_models_was_taken_is_told(bench: Bench) -> None:
    with served(Rival(models=("a", "b"))) as url:
        assert "of 2 models of the server this is a" in bench(url, "--json").json()["runs"][0]["notes"]
        assert bench(f"{url}?model=b", "--json").json()["model_id"] == "b"


def test_every_request_failing_exits_1_and_writes_the_document(bench: Bench, tmp_path: Path) -> None:
    async def fail(rival: Rival, seen: Seen, reply: Reply) -> bool:
        await reply.json({"error": {"message": "out of memory"}}, "500 Internal Server Error")
        return True

    with served(Rival(fault=fail)) as url:
        result = bench(url, "-o", str(tmp_path / "r.json"))
    assert result.code == 1
    assert "Every request failed; the first: HTTP 500: out of memory." in result.err
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["failed"] == 3
    assert document["partial"] is False
    assert "Failed requests" in result.out


def test_a_workload_that_is_not_supported_is_no_failure(cli: Cli) -> None:
    async def refuse(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if "response_format" not in seen.fields:
            return False
        await reply.json({"error": {"message": "no response_format here"}}, "400 Bad Request")
        return True

    with served(Rival(fault=refuse)) as url:
        result = cli("bench", "serve", url, "--workload", "json", "--requests", "2", "--json")
    assert result.code == 0
    assert "json is not supported: HTTP 400: no response_format here" in result.err
    document = result.json()
    assert [run["unsupported"] for run in document["runs"]] == ["HTTP 400: no response_format here"]


def test_odd_servers_are_measured_and_told_of(bench: Bench) -> None:
    with served(Rival(tells_usage=False)) as url:
        run = bench(url, "--json").json()["runs"][0]
    assert run["token_source"] == "pieces"
    assert any("came without usage" in note for note in run["notes"])


def test_a_client_that_costs_too_much_is_told_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "calibrate", lambda: Overhead(0.4, 0.2, 0.1, 600))
    with served(Rival()) as url:
        notes = bench(url, "--json").json()["runs"][0]["notes"]
    assert any(note.startswith("the client takes 0.40 ms of CPU a token") for note in notes)


def test_an_overhead_that_cannot_be_measured_is_a_note(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise LocalLLMError("It does not start.", "")

    monkeypatch.setattr(under_test, "calibrate", fail)
    with served(Rival()) as url:
        document = bench(url, "--json").json()
    assert document["calibration"] is None
    assert any("It does not start." in note for note in document["runs"][0]["notes"])


def test_several_loads_have_a_knee(bench: Bench) -> None:
    with served(Rival(token_s=0.002)) as url:
        document = bench(url, "--json", "--concurrency", "1,2", "--requests", "4").json()
    assert [(run["cache"], run["load"]["concurrency"]) for run in document["runs"]] == [
        ("cold", 1),
        ("cold", 2),
        ("warm", 1),
        ("warm", 2),
    ]
    assert document["knee"]["load"]["concurrency"] in (1, 2)


def test_a_rate_is_an_open_loop(bench: Bench) -> None:
    with served(Rival()) as url:
        document = bench(url, "--json", "--rate", "40:gamma=0.5").json()
    assert {(run["request_rate"], run["burstiness"]) for run in document["runs"]} == {(40.0, 0.5)}


# --- how it ends


def test_ctrl_c_writes_what_there_is_and_exits_130(bench: Bench, tmp_path: Path) -> None:
    async def interrupt(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) == 12:  # in the first run
            os.kill(os.getpid(), signal.SIGINT)
        return False

    with served(Rival(fault=interrupt, first_s=0.01)) as url:
        result = bench(url, "--requests", "500", "-o", str(tmp_path / "r.json"))
    assert result.code == 130
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["partial"] is True
    assert len(document["runs"]) == 1
    assert 0 < document["completed"] < 20
    assert "ended early" in result.err
    assert "artial" in result.out


def test_ctrl_c_before_anything_was_measured_writes_nothing(bench: Bench, tmp_path: Path) -> None:
    async def interrupt(rival: Rival, seen: Seen, reply: Reply) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with served(Rival(fault=interrupt)) as url:
        result = bench(url, "-o", str(tmp_path / "r.json"), "--json")
    assert result.code == 130
    assert result.json()["error"]["code"] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_dies_is_told_and_what_there_is_is_kept(bench: Bench, tmp_path: Path) -> None:
    dying = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.serving.mortal", "14"],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dying.stdout is not None
    try:
        url = dying.stdout.readline().strip()
        result = bench(url, "--requests", "500", "-o", str(tmp_path / "r.json"))
    finally:
        dying.kill()
        dying.wait()
        dying.stdout.close()
    assert result.code == 6
    assert "The server stopped answering after" in result.err
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["partial"] is True
    assert document["completed"] > 0


def test_a_full_disk_leaves_the_result_on_stdout(cli: Cli) -> None:
    with served(Rival()) as url:
        result = cli("bench", "serve", url, *SHORT, "--json", "-o", "/dev/full")
    assert result.code == 1
    assert "error: Cannot write /dev/full" in result.err
    assert result.json()["completed"] > 0


# --- our own server, on an engine that computes nothing


@contextmanager
def own_bench(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `bench serve` on a model file in a process of its own; nothing of it is left."""
    variables = {
        "LOCALLLM_FAULTS": "1",
        "LOCALLLM_ENGINE": "tests.fake_engine:parts",
        "FAKE_STEP_MS": "1",
        "PYTHONPATH": str(PROJECT),
        "LOCALLLM_HOME": str(home / "home"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", "bench", "serve", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        children = _descendants(process.pid)
        process.kill()
        process.communicate()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def test_a_model_is_served_measured_and_gone(tiny: Path, tmp_path: Path) -> None:
    model = str(tiny / "llama-dense.gguf")
    workload = ("--workload", "chat:turns=2,system=8,user=8,reply=8,answer=4,cache=cold+restart")
    with own_bench(tmp_path, model, *workload, "--requests", "2", "--warmup", "0", "--json") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert [(run["cache"], run["completed"]) for run in document["runs"]] == [("cold", 2), ("restart", 2)]
    assert document["runs"][0]["peak_memory_bytes"] > 0
    assert document["fingerprint"]["model"]["sha256"]
    assert not _processes_of(model)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_our_own_server_too_and_keeps_what_there_is(
    tiny: Path, tmp_path: Path, number: int, code: int
) -> None:
    model = str(tiny / "llama-dense.gguf")
    with own_bench(tmp_path, model, "--requests", "100000", "-o", str(tmp_path / "r.md")) as process:
        give_up_s = time.monotonic() + 60
        while _n_answered(model) < 20:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "artial" in (tmp_path / "r.md").read_text()
    assert not _processes_of(model)


def _processes_of(model: str) -> list[psutil.Process]:
    """Return the servers of a model, whoever started them."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if model in process.cmdline() and "bench" not in process.cmdline():
                found.append(process)
    return found


def _n_answered(model: str) -> int:
    """Return how many requests the server of a model says it answered; 0 while there is none."""
    for process in _processes_of(model):
        with suppress(psutil.Error, OSError, ValueError):
            words = process.cmdline()
            port = words[words.index("--port") + 1]
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                lines = answer.read().decode().splitlines()
            chats = [line for line in lines if line.startswith("localllm_requests_total{") and "chat" in line]
            return int(sum(float(line.rpartition(" ")[2]) for line in chats))
    return 0


def test_a_model_that_is_not_there_has_its_own_exit_code(cli: Cli) -> None:
    result = cli("bench", "serve", "no-such-model-anywhere")
    assert result.code == 3
    assert "hint: " in result.err


def test_a_restart_of_what_is_not_ours_is_refused_before_anything_is_measured(cli: Cli) -> None:
    rival = Rival()
    with served(rival) as url:
        result = cli("bench", "serve", url, "--workload", "chat:cache=cold+restart")
    assert result.code == 2
    assert "cache=restart needs a server that was started here" in result.err
    assert rival.asked == []
