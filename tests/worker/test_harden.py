"""A worker's process leaves no dump, no orphan and hears no signal that was meant for others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.worker.lone_worker import wait_until

REPORT = """
import json, os, resource, signal, sys, threading
from localllm.worker.harden import harden, take_niceness
harden()
take_niceness(3)
nices = []
thread = threading.Thread(target=lambda: nices.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start(); thread.join()
def text(name):
    try:
        return open(f"/proc/self/{name}").read().strip()
    except OSError:
        return None
os.write(2, json.dumps({
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "filter": text("coredump_filter"),
    "oom": text("oom_score_adj"),
    "backtrace": os.environ.get("GGML_NO_BACKTRACE"),
    "ignored": [signal.getsignal(number) == signal.SIG_IGN for number in (1, 2, 3, 15)],
    "stdin": os.read(0, 10).decode(),
    "stdout": os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev,
    "nice": os.nice(0), "nice_of_threads": nices[0],
}).encode())
print("this goes nowhere", flush=True)
"""


def python(script: str, *arguments: str, **settings: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=PROJECT, **settings)  # type: ignore[call-overload, no-any-return]


def test_it_dumps_nothing_and_leaves_the_terminal() -> None:
    process = python(REPORT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(b"typed text", timeout=20)
    told = json.loads(err)
    assert out == b""
    assert told["core"] == [0, 0]
    assert told["backtrace"] == "1"
    assert all(told["ignored"])
    assert told["stdin"] == ""
    assert told["stdout"]
    assert told["nice"] == told["nice_of_threads"] == min(os.nice(0) + 3, 19)
    if sys.platform == "linux":
        assert int(told["filter"], 16) == 0
        assert told["oom"] == "500"


def test_a_full_stderr_keeps_nobody_waiting() -> None:
    script = (
        "import os\n"
        "from localllm.worker.harden import harden\n"
        "harden()\n"
        "for _ in range(100):\n"
        "    try: os.write(2, b'x' * 4096)\n"
        "    except BlockingIOError: os._exit(7)\n"
    )
    process = python(script, stderr=subprocess.PIPE)
    try:
        assert process.wait(20) == 7
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only there does the kernel end a child with its parent")
@pytest.mark.parametrize("stopped", [False, True])
def test_it_dies_with_its_parent_even_while_it_is_stopped(stopped: bool, tmp_path: Path) -> None:
    child = (
        "import time\nfrom localllm.worker.harden import harden\nharden()\nprint(1)\nopen({0!r}, 'w')\ntime.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child.format(str(tmp_path / 'ready'))!r}])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = python(parent, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        wait_until((tmp_path / "ready").exists)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait(10)
        died_s = time.monotonic()
        wait_until(lambda: not runs(pid), 5)
        assert time.monotonic() - died_s < 1.0
    finally:
        process.kill()
        process.communicate()
        if runs(pid):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
