"""`localllm bench`: its short form, its formats, what goes where, and Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import localllm.bench.engine.plan
from localllm.bench.engine.plan import Plan
from localllm.bench.engine.recorder import Recorder
from localllm.errors import ModelNotFound
from tests.bench.engine import rows
from tests.cli.conftest import Result

Cli = Callable[..., Result]


class FakeMeasure:
    """Stands for `plan.measure`: remembers the plan, hands out rows, and does what else it is told."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.then: Callable[[], None] = lambda: None

    def __call__(self, plan: Plan, recorder: Recorder, opener: Any) -> None:
        self.plans.append(plan)
        recorder.rows.extend(rows.ALL)
        recorder.on_progress("pp512", 1, 5)
        self.then()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> FakeMeasure:
    """Let nothing be measured."""
    fake = FakeMeasure()
    monkeypatch.setattr(localllm.bench.engine.plan, "measure", fake)
    return fake


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["bench"], "smollm2:135m"),
        (["bench", "engine"], "smollm2:135m"),
        (["bench", "m.gguf"], "m.gguf"),
        (["bench", "engine", "m.gguf"], "m.gguf"),
        (["bench", "--threads", "1", "m.gguf"], "m.gguf"),
        (["bench", "m.gguf", "--format", "csv"], "m.gguf"),
        (["bench", "./engine"], "./engine"),
        (["bench", "engine", "engine"], "engine"),
        (["bench", "./serve"], "./serve"),
    ],
)
def test_a_model_without_sub_command_is_measured(
    cli: Cli, measured: FakeMeasure, arguments: list[str], model: str
) -> None:
    result = cli(*arguments)
    assert result.code == 0
    assert [plan.model for plan in measured.plans] == [model]
    assert ("no model named" in result.err) == (model == "smollm2:135m")


def test_help_names_the_sub_command(cli: Cli, measured: FakeMeasure) -> None:
    result = cli("bench", "--help")
    assert result.code == 0
    assert "engine" in result.out
    assert measured.plans == []


def test_engine_flags_reach_the_plan(cli: Cli, measured: FakeMeasure) -> None:
    cli("bench", "m", "--ctx", "2048", "--kv", "q8_0", "--flash-attn", "on", "--gpu", "off", "--threads", "3")
    config = measured.plans[0].config
    assert (config.ctx, str(config.kv), config.flash_attn, config.gpu, config.threads) == (2048, "q8_0", "on", "off", 3)


def test_stdout_is_the_rows_and_nothing_else(cli: Cli, measured: FakeMeasure) -> None:
    result = cli("bench", "m")
    assert result.out.startswith("| model")
    assert result.err == ""


def test_json_is_short_for_its_format(cli: Cli, measured: FakeMeasure) -> None:
    short, long = cli("bench", "m", "--json"), cli("bench", "m", "--format", "json")
    assert short.out == long.out
    document = json.loads(short.out)
    assert document["overhead_ratio"] == 0.981
    assert len(document["rows"]) == len(rows.ALL)


def test_json_lines_and_csv(cli: Cli, measured: FakeMeasure) -> None:
    assert len(cli("bench", "m", "--format", "jsonl").jsonl()) == len(rows.ALL)
    assert len(list(csv.reader(io.StringIO(cli("bench", "m", "--format", "csv").out)))) == len(rows.ALL) + 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "m", "--json", "--format", "csv"],
        ["bench", "m", "--format", "xml"],
        ["bench", "m", "--threads", "none"],
        ["bench", "m", "--kv", "q8_0", "--flash-attn", "off"],
        ["bench", "m", "other"],
    ],
)
def test_what_makes_no_sense_is_refused_before_measuring(cli: Cli, measured: FakeMeasure, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert "error: " in result.err
    assert measured.plans == []


def test_a_failure_is_a_sentence_and_under_json_a_document(cli: Cli, measured: FakeMeasure) -> None:
    def fail() -> None:
        raise ModelNotFound("No model m.", "localllm ls")

    measured.then = fail
    result = cli("bench", "m", "--format", "json")
    assert result.code == 3
    assert result.json()["error"]["code"] == "model_not_found"
    assert "No model m." in result.err
    assert cli("bench", "m").out == ""


@pytest.mark.parametrize("form", ["md", "json", "jsonl", "csv"])
def test_ctrl_c_prints_what_was_measured_and_exits_130(cli: Cli, measured: FakeMeasure, form: str) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    measured.then = interrupt
    result = cli("bench", "m", "--format", form)
    assert result.code == 130
    assert "pp512" in result.out
    assert "interrupted" in result.err
    if form == "json":
        assert result.json()["partial"] is True
    if form == "md":
        assert "partial" in result.out


def test_a_server_measured_without_a_verb_is_told_the_verb(cli: Cli) -> None:
    done = cli("bench", "http://127.0.0.1:8080/v1", "--requests", "2")
    assert (done.code, done.out) == (2, "")
    assert "hint: localllm bench serve http://127.0.0.1:8080/v1" in done.err
