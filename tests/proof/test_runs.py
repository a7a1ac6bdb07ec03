"""The proof runs themselves, small and on an engine that computes nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from proof import canary, load_run
from proof.fault_run import Part
from proof.faults import run_part
from proof.processes import context_switches, cpu_s, usage
from proof.serving import Serving, alive, fake_engine, get
from tests.conftest import PROJECT

QUICK = {**fake_engine(2.0), "FAKE_NO_EOS": "1"}


@pytest.fixture
def model(tiny: Path) -> Path:
    """Any file that is a model: the fake engine does not read it."""
    return sorted(tiny.glob("*.gguf"))[0]


def test_a_server_is_found_measured_and_gone_afterwards(model: Path, tmp_path: Path) -> None:
    with Serving(tmp_path, [str(model)], QUICK) as serving:
        (worker,) = serving.workers()
        pids = [serving.pid, worker]
        for pid in pids:
            assert usage(pid).rss_bytes > 10_000_000
            assert usage(pid).n_fds > 3
            assert cpu_s(pid) > 0.05
            assert context_switches(pid) > 0
        assert get(serving.target(), "/v1/models").status == 200
        assert serving.stop() == 143
    assert alive(pids) == []


def test_a_worker_killed_under_load_loses_no_request(model: Path, tmp_path: Path) -> None:
    found = run_part(Part("fake", 1, QUICK, (4, 40), is_exact=True), model, 2, 1, tmp_path)
    assert found["wrong"] == []
    sums = found["sums"]
    assert (sums["survived"], sums["lost"], sums["left_processes"], sums["server_survived"]) == (1, 0, 0, True)
    assert found["lines"][0]["good_answer_ms"] > 0
    assert sums["requests"] > 8


def test_load_is_held_without_errors(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_run, "SETTLE_S", 0.2)
    with Serving(tmp_path, [str(model), "--log-format", "json"], QUICK) as serving:
        found = load_run.run(serving, 2.0, 1)
    assert (found["bad"], found["history"], found["left_processes"]) == ({}, [], 0)
    assert found["ends"]["answer"] > 16
    assert len(found["memory_by_part"]["worker"]) == 10


def test_canaries_are_sent_in_every_kind_and_none_is_found(model: Path) -> None:
    found = canary.run(model, 160, QUICK, [])
    assert found["where"] == []
    assert found["search_works"]
    assert found["places"]["log"] == 2
    assert sum(n for server in found["servers"] for n in server["statuses"].values()) == 160
    assert not {"0", "500"} & {status for server in found["servers"] for status in server["statuses"]}


def test_a_run_that_is_terminated_leaves_no_server(model: Path, tmp_path: Path) -> None:
    order = [sys.executable, "-m", "proof.load_run", "--fake", "--model", str(model), "-o", str(tmp_path / "x.json")]
    with subprocess.Popen(order, cwd=PROJECT, stderr=subprocess.DEVNULL) as run:
        deadline_s = time.monotonic() + 30
        while len(children := psutil.Process(run.pid).children(recursive=True)) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        run.terminate()
        assert run.wait(30) == 143
    assert len(children) == 2
    psutil.wait_procs(children, timeout=5)  # a worker ends within a second of its server
    assert alive([child.pid for child in children]) == []
