"""Timing a start: the first byte, the peak of that process alone, and the ways it can fail."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

from localllm.bench.engine.bare_script import BareStart
from localllm.bench.engine.startup import Start, interleaved, start, start_detached
from localllm.errors import LocalLLMError, TimedOut


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_time_ends_with_the_first_byte_not_with_the_process() -> None:
    found = start(python("import sys, time; time.sleep(0.2); print('x', flush=True); time.sleep(20)"))
    assert 0.2 <= found.first_byte_s < 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_process_alone_not_of_its_parent() -> None:
    ballast = bytearray(400 << 20)  # resident here when the small process is started
    small = start(python("import sys; print('x', flush=True); sys.stdin.read()"))
    large = start(python("import sys; b = b'1' * (150 << 20); print('x', flush=True); sys.stdin.read()"))
    assert small.peak_rss_bytes < 100 << 20 < len(ballast)
    assert 140 << 20 < large.peak_rss_bytes - small.peak_rss_bytes < 200 << 20


def test_nothing_on_stdin_for_the_command_that_takes_a_prompt_there() -> None:
    found = start_detached(python("import sys; print(len(sys.stdin.read()), flush=True)"))
    assert found.first_byte_s > 0


def test_a_command_that_fails_is_told_with_its_last_line() -> None:
    with pytest.raises(LocalLLMError, match=r"ended with code 3: no such model"):
        start(python("import sys; print('no such model', file=sys.stderr); sys.exit(3)"))


def test_a_command_that_says_nothing_is_ended() -> None:
    with pytest.raises(TimedOut, match=r"wrote nothing within 0\.3 s"):
        start(python("import time; time.sleep(60)"), timeout_s=0.3)


def test_pairs_change_their_order_and_skip_the_first_of_each() -> None:
    calls: list[str] = []

    def run(name: str, seconds: float) -> Start:
        calls.append(name)
        return Start(seconds, 1)

    pairs = list(islice(interleaved(lambda: run("ours", 2.0), lambda: run("bare", 1.0)), 3))
    assert "".join(name[0] for name in calls) == "ob" + "ob" + "bo" + "ob"
    assert all((ours.first_byte_s, bare.first_byte_s) == (2.0, 1.0) for ours, bare in pairs)


@pytest.mark.real
def test_the_bare_script_prefills_and_writes_one_piece(smollm2: Path) -> None:
    bare = BareStart(smollm2, tuple(range(100, 110)), n_ctx=256, n_threads=2, repack=False)
    found = start(bare.command())
    assert found.peak_rss_bytes > smollm2.stat().st_size
