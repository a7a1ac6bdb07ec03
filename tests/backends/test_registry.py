"""Which engine runs what; what no engine runs is refused with a sentence; the library reports itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.backends import registry
from localllm.backends.llamacpp import report
from localllm.backends.llamacpp.report import features_of
from localllm.backends.placement import place
from localllm.errors import ModelNotFound, ModelRefused
from localllm.models.info import read_info
from localllm.runtime.config import LoadConfig
from localllm.runtime.engine import Batch, BatchItem


def test_a_gguf_file_runs_on_llamacpp(tiny: Path) -> None:
    assert registry.engine_kind(tiny / "llama-dense.gguf") is registry.EngineKind.LLAMACPP


def test_what_no_engine_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        registry.engine_kind(tmp_path / "nothing.gguf")
    with pytest.raises(ModelRefused, match="directory"):
        registry.engine_kind(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match="MLX"):
        registry.engine_kind(tmp_path)


def test_a_placed_model_opens_and_answers(tiny: Path) -> None:
    info = read_info(tiny / "qwen2-dense.gguf")
    plan = place(info, registry.machine(), LoadConfig(), 100)
    engine = registry.open_engine(registry.load_model(info, plan, "hash"), plan)
    assert engine.spec.max_sequence_tokens == 256  # trained for no more
    assert engine.spec.fingerprint.startswith("model=hash ")
    assert engine.forward(Batch((BatchItem(0, 0, [1, 2, 3], 1),))).logits.shape == (1, 128)
    engine.close()


def test_a_vocabulary_loads_without_weights(shared: Path) -> None:
    info = read_info(shared / "models" / "vocab" / "ggml-vocab-phi-3.gguf")
    model = registry.load_vocabulary(info)
    assert model.tokenizer.decode(model.tokenizer.encode("Hello", parse_special=False)) == " Hello"
    model.close()


def test_registry_loads_no_engine_by_itself() -> None:
    code = "import sys, localllm.backends.registry; print([m for m in ('numpy', 'ctypes') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_library_reports_itself_from_another_process() -> None:
    found = registry.native_report()
    assert (found.failure, bool(found.version), "CPU" in {device.name for device in found.devices}) == ("", True, True)
    assert found.features
    assert [device.name for device in found.devices] == [device.name for device in registry.devices()]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "compiled for another CPU"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise SystemExit('no module')", "no module"),
    ],
)
def test_a_library_that_dies_is_a_report(monkeypatch: pytest.MonkeyPatch, command: str, told: str) -> None:
    run = subprocess.run

    def instead(_: object, **options: object) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-c", command], **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(report.subprocess, "run", instead)
    assert told in report.native_report().failure


def test_features_are_read_from_the_system_line() -> None:
    line = "CPU : SSE3 = 1 | AVX = 0 | AVX2 = 1 | OPENMP = 1 | "
    assert features_of(line) == ("SSE3", "AVX2", "OPENMP")
    assert json.dumps(features_of("")) == "[]"
