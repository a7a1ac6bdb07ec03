"""`localllm bench golden`: what goes where, and its exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import localllm
from localllm.runtime.engine import Batch
from tests.bench.goldens.models import FakeModels
from tests.cli.conftest import Result
from tests.fake_engine import FakeEngine, endless_token

Cli = Callable[..., Result]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    """Let `compose` find and open models without weights."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF and some weights")
    models = FakeModels(tmp_path)
    monkeypatch.setitem(sys.modules, "localllm.compose", models)
    monkeypatch.setattr(localllm, "compose", models, raising=False)
    return models


def test_what_was_recorded_is_unmoved(cli: Cli, models: FakeModels) -> None:
    recorded = cli("bench", "golden", "record", "m.gguf")
    assert (recorded.code, recorded.out) == (0, "")
    assert "recorded 12 prompts of m.gguf (F16, sha256 " in recorded.err
    checked = cli("bench", "golden", "check", "m.gguf")
    assert (checked.code, checked.err) == (0, "")
    assert checked.out.startswith("m.gguf  F16  ")
    assert ": unmoved\n" in checked.out
    assert checked.out.endswith("12 of 12 prompts the same; logprobs differ by at most 0 nats\n")


def test_what_moved_is_told_and_exits_10(cli: Cli, models: FakeModels) -> None:
    cli("bench", "golden", "record", "m.gguf")
    models.engine = lambda: FakeEngine(script=endless_token, noise=3.0)
    text = cli("bench", "golden", "check", "m.gguf")
    assert text.code == 10
    assert "logprobs moved by up to" in text.out
    assert "error: Moved from its golden: m.gguf.\nhint: " in text.err
    document = cli("bench", "golden", "check", "m.gguf", "--json")
    assert document.code == 10
    assert document.json()["moved"] is True
    assert document.json()["goldens"][0]["prompts"][0]["moved"] == ["logprobs"]


def test_json_of_a_recording_names_its_file_and_no_answers(cli: Cli, models: FakeModels) -> None:
    document = cli("bench", "golden", "record", "m.gguf", "--json").json()
    assert document["n_prompts"] == 12
    assert Path(document["path"]).parent == Path(os.environ["LOCALLLM_HOME"]) / "goldens"
    assert Path(document["path"]).is_file()
    assert "entries" not in document


def test_without_model_or_golden_it_exits_3(cli: Cli, models: FakeModels) -> None:
    for arguments, sentence in (
        (["check", "m.gguf"], "There is no golden of m.gguf."),
        (["check"], "No model of the store has a golden."),
        (["check", "other.gguf"], "There is no other.gguf."),
        (["record", "other.gguf"], "There is no other.gguf."),
    ):
        result = cli("bench", "golden", *arguments, "--json")
        assert result.code == 3
        assert sentence in result.err
        assert result.json()["error"]["code"] == "model_not_found"
    assert cli("bench", "golden", "record").code == 2


def test_the_group_explains_itself(cli: Cli, models: FakeModels) -> None:
    assert "record" in cli("bench", "golden", "--help").out
    assert "golden" in cli("bench", "--help").out
    assert "exit 10" in " ".join(cli("bench", "golden", "check", "--help").out.split())


def test_ctrl_c_keeps_no_half_golden(cli: Cli, models: FakeModels) -> None:
    def interrupt(batch: Batch) -> None:
        if batch.n_rows == 1 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[bool] = []
    models.engine = lambda: FakeEngine(script=endless_token, on_forward=interrupt)
    result = cli("bench", "golden", "record", "m.gguf")
    assert result.code == 130
    assert not list(Path(os.environ["LOCALLLM_HOME"]).rglob("goldens/*.json"))
    assert models.engines[-1].closed
