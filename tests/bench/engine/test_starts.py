"""What is started for the comparison of starts, and what becomes of the pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.bench.engine import starts
from localllm.bench.engine.bare_script import BareStart
from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.starts import RunCommand, measure_help, measure_starts
from localllm.bench.engine.startup import Start
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig
from localllm.runtime.types import ChatRequest, CompletionRequest
from tests.bench.engine.rows import FACTS
from tests.cli.conftest import Opened, Result, cli, opened  # noqa: F401  # fixtures


@pytest.mark.parametrize("raw", [False, True])
def test_the_command_asks_for_what_its_request_says(
    cli: Callable[..., Result],  # noqa: F811
    opened: Opened,  # noqa: F811
    raw: bool,
) -> None:
    config = LoadConfig(ctx=512, kv=KvTypes("q8_0", "f16"), flash_attn="on", gpu="off", threads=3)
    run = RunCommand("m", config, raw=raw)
    command = run.command()
    assert command[:4] == [sys.executable, "-m", "localllm", "run"]
    assert cli(*command[3:]).code == 0
    (model, given, request) = opened.calls[0]
    assert (model, given) == ("m", config)
    ours = run.request()
    assert isinstance(ours, CompletionRequest if raw else ChatRequest)
    assert request.options.max_tokens == ours.options.max_tokens
    assert dict(request.options.sampling) == dict(ours.options.sampling)
    if raw:
        assert request.prompt == ours.prompt  # type: ignore[union-attr]
    else:
        assert request.messages == ours.messages  # type: ignore[union-attr]


def test_pairs_become_a_ratio_and_the_memory_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "start_detached", lambda command: Start(1.2, 300))
    monkeypatch.setattr(starts, "start", lambda command: Start(1.0, 250))
    recorder = Recorder()
    bare = BareStart(Path("m.gguf"), tuple(range(35)), n_ctx=512, n_threads=2)
    measure_starts(RunCommand("m", LoadConfig()), bare, FACTS, 3, recorder)
    (row,) = recorder.rows
    flat = row.flat()
    assert flat["test"] == "start pp35"
    assert flat["start_ratio"] == pytest.approx(1.2)
    assert (flat["peak_rss_bytes"], flat["bare_peak_rss_bytes"]) == (300, 250)
    assert (flat["avg_ns"], flat["bare_avg_ns"]) == (1_200_000_000, 1_000_000_000)
    assert flat["avg_ts"] is None
    assert len(row.samples_ns) == 3


def test_help_is_timed_as_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    measure_help(2, recorder)
    assert recorder.help_s is not None
    assert recorder.help_s.n == 2
    assert 0.01 < recorder.help_s.median < 30


@pytest.mark.real
def test_run_is_timed_against_the_bare_script_on_the_real_model(smollm2: Path) -> None:
    run = RunCommand(str(smollm2), LoadConfig(threads=1))
    recorder = Recorder()
    bare = BareStart(smollm2, tuple(range(100, 110)), n_ctx=512, n_threads=1, repack=False)
    measure_starts(run, bare, FACTS, 1, recorder)
    assert 0.2 < recorder.rows[0].flat()["start_ratio"] < 20
