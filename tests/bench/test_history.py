"""What is remembered of benchmarks, who may read it, and that nothing about it fails a benchmark unseen."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from localllm.bench import history
from localllm.bench.engine.formats import document
from localllm.bench.engine.report import Report
from localllm.errors import LocalLLMError
from tests.bench.compare import made_up
from tests.bench.engine import rows


def run(ttft_ms: float = 200.0, **more: Any) -> dict[str, Any]:
    return made_up.run([0.2] * 9, [0.02] * 9, p95_ttft_ms=ttft_ms, **more)


@pytest.fixture
def path(isolated_home: Path) -> Path:
    """Where the history of this test stands."""
    return isolated_home / "localllm" / history.FILE_NAME


def test_a_run_is_a_row_with_what_it_was_and_what_was_found(path: Path) -> None:
    history.remember(made_up.serve(run(), run(cache="warm")), Path("/results/a.json"))
    warm, cold = history.entries()
    assert (cold.name, warm.name) == ("chat, cold, concurrency 1", "chat, warm, concurrency 1")
    assert (cold.tool, cold.model, cold.file) == ("bench serve", "small", "/results/a.json")
    assert cold.measures["ttft_p95"] == 200.0
    assert cold.measures["error"] == 0.0
    assert cold.facts["seed"] == "1"
    assert cold.fingerprint_id == "a" * 16
    assert cold.changes == {}
    assert cold.at.endswith("Z")


def test_an_engine_s_tests_are_one_row() -> None:
    history.remember(document(Report(rows.ALL, {})))
    (entry,) = history.entries()
    assert (entry.tool, entry.name) == ("bench engine", "7 tests")
    assert entry.measures["pp512"] == 384.0
    assert entry.measures["start pp35"] == 710.0


def test_a_contract_s_rounds_are_one_row_a_candidate_and_cell() -> None:
    history.remember(made_up.contract([run(200.0), run(300.0)]))
    (entry,) = history.entries()
    assert (entry.name, entry.measures["ttft_p95"]) == ("ours, chat, cold, concurrency 1", 250.0)


def test_changes_are_against_the_last_run_like_it_that_can_be_trusted() -> None:
    for ttft_ms, more in (
        (200.0, {}),
        (100.0, {"workload": "rag"}),
        (400.0, {"disturbances": ["it swapped"]}),
        (250.0, {}),
    ):
        history.remember(made_up.serve(run(ttft_ms, **more)))
    newest, disturbed, rag, first = history.entries()
    assert newest.changes["ttft_p95"] == pytest.approx(0.25)
    assert disturbed.is_doubtful
    assert rag.changes == first.changes == {}


def test_another_machine_s_runs_are_not_like_it() -> None:
    history.remember(made_up.serve(run()))
    history.remember(made_up.serve(run(), machine={**made_up.MACHINE, "ram_bytes": 1}))
    assert history.entries()[0].changes == {}


def test_only_models_asked_for() -> None:
    history.remember(made_up.serve(run()))
    assert len(history.entries("SMALL")) == 1
    assert history.entries("large") == []


def test_only_the_user_may_read_it_and_it_holds_no_text_of_requests(path: Path) -> None:
    secret = "what the user asked"
    history.remember(made_up.serve(run(errors=[secret] + [""] * 8, generated_texts=[secret] * 9, notes=[secret])))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.encode() not in path.read_bytes()


def test_nothing_is_made_by_looking(path: Path) -> None:
    assert history.entries() == []
    assert not path.exists()


def test_a_file_that_a_writer_only_just_made_holds_nothing_yet(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert history.entries() == []


def write_half(path: Path) -> None:
    """Write until pages of an open transaction are in the file, and die."""
    base = sqlite3.connect(path)
    base.execute("PRAGMA cache_size = 5")
    base.execute("BEGIN IMMEDIATE")
    for _ in range(300):
        base.execute("UPDATE run SET name = name || ?", ("x" * 200,))
    os._exit(9)


def test_a_writer_that_was_killed_takes_no_run_with_it(path: Path) -> None:
    for _ in range(20):
        history.remember(made_up.serve(run()))
    writer = multiprocessing.get_context("fork").Process(target=write_half, args=(path,))
    writer.start()
    writer.join(60)
    assert path.with_name(f"{path.name}-journal").stat().st_size > 512
    assert {entry.name for entry in history.entries()} == {"chat, cold, concurrency 1"}


def look() -> None:
    with pytest.raises(LocalLLMError, match="is not a file"):
        history.entries()


def test_a_pipe_in_its_place_is_told_and_not_waited_for(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    looking = multiprocessing.get_context("fork").Process(target=look)
    looking.start()
    looking.join(10)
    looking.kill()
    looking.join()
    assert looking.exitcode == 0


def write(n: int) -> None:
    for _ in range(n):
        history.remember(made_up.serve(run()))


def test_writers_at_once_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(5,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(history.entries()) == 20


def test_a_damaged_file_is_told_and_left_alone(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no database at all, but long enough to be looked at " * 40)
    before = path.read_bytes()
    with pytest.raises(LocalLLMError, match="is damaged") as error:
        history.remember(made_up.serve(run()))
    assert error.value.hint.startswith("mv ")
    with pytest.raises(LocalLLMError, match="is damaged"):
        history.entries()
    assert path.read_bytes() == before


def test_a_file_of_a_newer_version_is_told_and_left_alone(path: Path) -> None:
    history.remember(made_up.serve(run()))
    with sqlite3.connect(path) as base:
        base.execute(f"PRAGMA user_version = {history.VERSION + 1}")
    base.close()
    for act in (lambda: history.remember(made_up.serve(run())), history.entries):
        with pytest.raises(LocalLLMError, match="newer localllm"):
            act()


def test_a_row_that_somebody_broke_is_told(path: Path) -> None:
    history.remember(made_up.serve(run()))
    with sqlite3.connect(path) as base:
        base.execute("UPDATE run SET measures = '[1'")
    base.close()
    with pytest.raises(LocalLLMError, match="cannot be read"):
        history.entries()


def test_a_writer_that_waits_too_long_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history.remember(made_up.serve(run()))
    monkeypatch.setattr(history, "WAIT_S", 0.05)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(LocalLLMError, match="locked"):
            history.remember(made_up.serve(run()))
    finally:
        other.rollback()
        other.close()
    assert len(history.entries()) == 1


def test_a_folder_that_cannot_be_written_is_told(path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(LocalLLMError, match=r"File exists|Not a directory"):
        history.remember(made_up.serve(run()))


def test_a_history_that_others_could_read_is_closed_to_them(path: Path) -> None:
    history.remember(made_up.serve(run()))
    path.chmod(0o644)
    history.remember(made_up.serve(run()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_planted_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(LocalLLMError):
        history.remember(made_up.serve(run()))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("broken", [{}, {"localllm_bench_serve": 1, "runs": 3}, {"localllm_bench_serve": 9}])
def test_a_document_that_is_none_is_told(broken: dict[str, Any], path: Path) -> None:
    with pytest.raises(LocalLLMError):
        history.remember(broken)
    assert not path.exists()
