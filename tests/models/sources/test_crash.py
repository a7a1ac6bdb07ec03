"""Processes that pull at once, and processes that are killed while they pull."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localllm.models.sources import pull
from localllm.models.store import Store
from tests.conftest import PROJECT
from tests.fake_hub import FakeHub, Request, gguf_bytes

REPO = "org/model-GGUF"

# Fetches one known file, as a pull does once it has asked the hub (asking takes most of a short pull's time).
FETCH = """
import hashlib, sys
from pathlib import Path
from localllm.models.provenance import StoredFile
from localllm.models.sources import download, pulling
from localllm.models.sources.download import Patience, RemoteFile
from localllm.models.sources.net import policy_for
from localllm.models.sources.partial import Expected
from localllm.models.sources.transport import Transport
from localllm.models.store import Store

class Fixed:
    name = "fixed:1"
    def holds(self, stored):
        return True
    def fill(self, staging, meter):
        url, sha256, size = sys.argv[2], sys.argv[3], int(sys.argv[4])
        remote = RemoteFile(url, "m-Q8_0.gguf", Expected(size, sha256=sha256))
        transport = Transport(policy_for(url, named=True))
        digest = download.fetch(remote, staging, transport, meter, patience=Patience(chunk_bytes=1 << 14))
        return pulling.Fetched((StoredFile(remote.name, size, digest),), "fixed", "1", None)

pulling.run(Fixed(), Store(Path(sys.argv[1])), None)
"""


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *arguments], cwd=PROJECT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_puller_killed_at_random_points_is_resumed(tmp_path: Path) -> None:
    """Killed while fetching (by bytes) and around the end (by time): never half a model, little fetched twice."""
    rng = random.Random(11)
    data = gguf_bytes(3_000_000)
    store = Store(tmp_path / "store")
    with FakeHub(bytes_per_s=8e6) as hub:
        hub.add(REPO, {"m.gguf": data})
        (sha256,) = hub.blobs
        arguments = [FETCH, str(store.home), f"{hub.url}/cdn/{sha256}", sha256, str(len(data))]
        arrived, refetched = 0, []
        targets = sorted(rng.randrange(200_000, len(data)) for _ in range(6))
        for target in [*targets, 0, 0]:
            n_before = len(hub.requests)
            process = start(arguments)
            if not target:
                hub.bytes_per_s = 0.0
                time.sleep(rng.uniform(0.2, 0.5))
            while target and process.poll() is None and not (len(hub.requests) > n_before and hub_reached(hub, target)):
                time.sleep(0.002)
            process.kill()
            process.communicate()
            assert all(model.problem == "" and model.path.read_bytes() == data for model in store.list())
            refetched += [arrived - begun(one) for one in hub.requests[n_before : n_before + 1]]
            arrived = sum(path.stat().st_size for path in store.partial.rglob("*.part"))
        last = start(arguments)
        _, error = last.communicate()
        assert (last.returncode, error) == (0, "")
        (model,) = store.list()
        assert model.path.read_bytes() == data
        assert len(refetched) >= 6
        assert max(refetched) <= 96 << 10  # of what had arrived: since the last record of how far it was proven


def begun(request: Request) -> int:
    return int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))


def hub_reached(hub: FakeHub, target: int) -> bool:
    """Tell whether the newest request has brought the file to `target` bytes."""
    newest = hub.requests[-1]
    return begun(newest) + newest.sent >= target


def test_several_processes_pull_the_same_model_once(tmp_path: Path) -> None:
    data = gguf_bytes(1_500_000)
    store = Store(tmp_path / "store")
    with FakeHub(bytes_per_s=3e6) as hub:
        hub.add(REPO, {"m.gguf": data})
        (sha256,) = hub.blobs
        arguments = [FETCH, str(store.home), f"{hub.url}/cdn/{sha256}", sha256, str(len(data))]
        processes = [start(arguments) for _ in range(4)]
        outcomes = [(process.communicate()[1], process.returncode) for process in processes]
        assert outcomes == [("", 0)] * 4
        assert hub.sent_bytes() == len(data)
        assert store.list()[0].path.read_bytes() == data


def test_when_the_puller_dies_the_one_that_waits_takes_over(tmp_path: Path) -> None:
    data = gguf_bytes(2_000_000)
    store = Store(tmp_path / "store")
    with FakeHub(bytes_per_s=4e6) as hub:
        hub.add(REPO, {"m.gguf": data})
        (sha256,) = hub.blobs
        arguments = [FETCH, str(store.home), f"{hub.url}/cdn/{sha256}", sha256, str(len(data))]
        first = start(arguments)
        while not (hub.requests and hub_reached(hub, 500_000)):
            time.sleep(0.005)
        second = start(arguments)
        time.sleep(0.1)
        first.kill()
        first.communicate()
        assert second.communicate()[1] == ""
        assert second.returncode == 0
        assert store.list()[0].path.read_bytes() == data
        assert begun(hub.requests[-1]) > 0


def test_whole_pulls_at_once_fetch_the_bytes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gguf_bytes(800_000)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "store"))
    with FakeHub(bytes_per_s=4e6) as hub:
        hub.add(REPO, {"m-Q4_K_M.gguf": data})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        script = "import sys; from localllm.models.sources import pull; print(pull(sys.argv[1]).sha256)"
        processes = [start([script, f"hf:{REPO}"]) for _ in range(2)]
        outcomes = [(*process.communicate(), process.returncode) for process in processes]
        assert [outcome[1:] for outcome in outcomes] == [("", 0)] * 2
        assert outcomes[0][0] == outcomes[1][0]
        assert hub.sent_bytes() == len(data)
        assert pull(f"hf:{REPO}").path.read_bytes() == data


def test_an_interrupted_process_leaves_a_partial(tmp_path: Path) -> None:
    data = gguf_bytes(2_000_000)
    store = Store(tmp_path / "store")
    with FakeHub(bytes_per_s=4e6) as hub:
        hub.add(REPO, {"m.gguf": data})
        (sha256,) = hub.blobs
        arguments = [FETCH, str(store.home), f"{hub.url}/cdn/{sha256}", sha256, str(len(data))]
        process = start(arguments)
        while not (hub.requests and hub_reached(hub, 800_000)):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate()[1]
        (left,) = store.unfinished()
        assert left.size_bytes > 400_000
        assert os.listdir(store.home / "partial")
