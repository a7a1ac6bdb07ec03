"""The benchmark on real native code: tiny models of several kinds, with small sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.bench.engine.opener import Opener
from localllm.bench.engine.plan import measure
from localllm.bench.engine.recorder import Recorder
from localllm.errors import ModelNotFound
from localllm.runtime.config import LoadConfig
from tests.bench.engine.test_plan import SMALL, SMALL_PLAN

# A step takes a fraction of a millisecond: sequences must be long to be at work at the same time.
SIZES = replace(SMALL, n_gen_parallel=100, overhead_gen_parallel=100)
PLAN = replace(SMALL_PLAN, sizes=SIZES, config=LoadConfig(threads=1, gpu="off"))
ROWS = ["pp24", "tg8", "tg4 @ d6", "pp24 @ d16", "tg100 x3", "tg100 @ d4 x3"]


def measured(path: Path) -> Recorder:
    recorder = Recorder()
    measure(replace(PLAN, model=str(path)), recorder, Opener(str(path)))
    return recorder


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense", "qwen3moe-moe"])
def test_every_row_of_a_model_that_can_be_cut(tiny: Path, name: str) -> None:
    recorder = measured(tiny / f"{name}.gguf")
    assert [row.case.name for row in recorder.rows] == ROWS
    assert recorder.notes == []
    assert all(row.avg_ts is not None and row.avg_ts > 0 for row in recorder.rows)


@pytest.mark.parametrize("name", ["mamba2-dense", "qwen35-dense"])
def test_a_model_that_cannot_be_cut_has_the_depth_row_or_a_note(tiny: Path, name: str) -> None:
    recorder = measured(tiny / f"{name}.gguf")
    found = [row.case.name for row in recorder.rows]
    assert [name for name in ROWS if name in found or "@ d16" in name] == ROWS
    assert ("pp24 @ d16" in found) != any("pp24 @ d16" in note for note in recorder.notes)


def test_rows_say_what_the_library_and_the_file_say(tiny: Path) -> None:
    path = tiny / "llama-dense.gguf"
    facts = measured(path).rows[0].facts
    assert facts.build_commit
    assert facts.cpu_info
    assert (facts.backends, facts.n_gpu_layers, facts.n_threads, facts.flash_attn) == ("CPU", 0, 1, -1)
    assert (facts.model_filename, facts.load_mode, facts.type_k) == (str(path), "mmap", "f16")
    assert facts.model_type.startswith("llama ")
    assert 0 < facts.model_size < path.stat().st_size
    assert facts.model_n_params > 0


def test_a_model_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    recorder = Recorder()
    path = str(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFound):
        measure(replace(PLAN, model=path), recorder, Opener(path))
    assert recorder.rows == []
