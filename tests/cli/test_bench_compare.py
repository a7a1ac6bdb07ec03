"""`localllm bench compare` and `history`: what goes where, and the exit codes."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localllm.bench.engine.plan
from localllm.bench import history
from localllm.bench.engine.plan import Plan
from localllm.bench.engine.recorder import Recorder
from tests.bench.compare import made_up
from tests.bench.engine import rows
from tests.cli.conftest import Result

Cli = Callable[..., Result]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Two files of llama-bench: the second decodes a tenth slower."""
    old = [made_up.row(512, 0, [300, 301, 302, 299, 298]), made_up.row(0, 128, [40, 40.1, 40.2, 39.9, 39.8])]
    new = [made_up.row(512, 0, [300, 301, 302, 299, 298]), made_up.row(0, 128, [36, 36.1, 36.2, 35.9, 35.8])]
    for name, value in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    return str(tmp_path / "old"), str(tmp_path / "new")


def test_a_change_alone_is_no_failure(cli: Cli, files: tuple[str, str]) -> None:
    result = cli("bench", "compare", *files)
    assert (result.code, result.err) == (0, "")
    assert "worse" in result.out


@pytest.mark.parametrize(
    ("rules", "code"),
    [("tg128<-5%", 10), ("tg128<-20%", 0), ("pp512<-5%", 0), ("pp512<-5%,tg128<-5%", 10), ("tg128<50", 10)],
)
def test_a_rule_that_holds_exits_10_after_the_whole_output(
    cli: Cli, files: tuple[str, str], rules: str, code: int
) -> None:
    result = cli("bench", "compare", *files, "--fail-on", rules)
    assert (result.code, result.err) == (code, "")
    assert ("FAILED" in result.out) == (code == 10)
    document = cli("bench", "compare", *files, "--fail-on", rules, "--json")
    assert document.code == code
    assert document.json()["passed"] == (code == 0)


def test_forms(cli: Cli, files: tuple[str, str]) -> None:
    assert cli("bench", "compare", *files, "--format", "md").out.startswith("# localllm bench compare")
    assert cli("bench", "compare", *files, "--json").out == cli("bench", "compare", *files, "--format", "json").out
    assert cli("bench", "compare", *files, "--json", "--format", "md").code == 2


def test_what_cannot_be_compared_exits_2_with_a_sentence(cli: Cli, files: tuple[str, str], tmp_path: Path) -> None:
    missing = cli("bench", "compare", files[0], str(tmp_path / "nowhere"))
    assert missing.code == 2
    assert missing.err.startswith(f"error: {tmp_path / 'nowhere'}: No such file or directory.\nhint: ")
    (tmp_path / "broken").write_text('[{"n_prompt": ', encoding="utf-8")
    broken = cli("bench", "compare", files[0], str(tmp_path / "broken"), "--json")
    assert broken.code == 2
    assert broken.json()["error"]["code"] == "invalid_request"
    for rules in ("ttft_p95>+5%", "tg128", "tg128>x"):
        assert cli("bench", "compare", *files, "--fail-on", rules).code == 2
    assert cli("bench", "compare", files[0]).code == 2


def test_another_machine_is_refused_unless_forced(cli: Cli, files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "other").write_text(
        json.dumps([made_up.row(0, 128, [40, 41, 42], cpu_info="Other CPU")]), encoding="utf-8"
    )
    refused = cli("bench", "compare", files[0], str(tmp_path / "other"))
    assert refused.code == 2
    assert "Machine: Some CPU in A, Other CPU in B." in refused.err
    assert refused.out == ""
    forced = cli("bench", "compare", files[0], str(tmp_path / "other"), "--force")
    assert forced.code == 0
    assert "!! machine: Some CPU in A, Other CPU in B" in forced.out


def test_history_is_empty_at_first_and_lists_what_was_measured(cli: Cli, isolated_home: Path) -> None:
    nothing = cli("bench", "history")
    assert (nothing.code, nothing.out) == (0, "")
    assert "nothing measured yet" in nothing.err
    assert cli("bench", "history", "--json").json() == {"runs": []}
    history.remember(made_up.serve(made_up.run([0.2] * 9, [0.02] * 9, p95_ttft_ms=200.0)), isolated_home / "a.json")
    history.remember(made_up.serve(made_up.run([0.3] * 9, [0.02] * 9, p95_ttft_ms=300.0)))
    lines = cli("bench", "history").out.splitlines()
    assert [lines[0].split()[0], len(lines)] == ["WHEN", 3]
    assert "ttft_p95 300 ms" in lines[1]
    assert "ttft_p95 +50.0%" in lines[1]
    assert "a.json" in lines[2]
    newest, first = cli("bench", "history", "--json").json()["runs"]
    assert newest["changes"]["ttft_p95"] == pytest.approx(0.5)
    assert first["file"] == str(isolated_home / "a.json")
    assert cli("bench", "history", "SMA").out.count("\n") == 3
    assert cli("bench", "history", "other").out == ""


def test_a_damaged_history_is_a_sentence(cli: Cli, isolated_home: Path) -> None:
    history.remember(made_up.serve(made_up.run([0.2] * 9, [0.02] * 9)))
    (isolated_home / "localllm" / history.FILE_NAME).write_bytes(b"this is no database" * 100)
    result = cli("bench", "history")
    assert result.code == 1
    assert "is damaged" in result.err
    assert "hint: mv " in result.err


def measure_rows(plan: Plan, recorder: Recorder, opener: Any) -> None:
    """Stand for `plan.measure`."""
    recorder.rows.extend(rows.ALL)


def test_the_engine_s_benchmark_is_remembered(cli: Cli, monkeypatch: pytest.MonkeyPatch, isolated_home: Path) -> None:
    monkeypatch.setattr(localllm.bench.engine.plan, "measure", measure_rows)
    assert cli("bench", "m").err == ""
    (entry,) = history.entries()
    assert (entry.tool, entry.measures["tg128"]) == ("bench engine", 64.0)
    assert stat.S_IMODE((isolated_home / "localllm" / history.FILE_NAME).stat().st_mode) == 0o600


def test_a_history_that_cannot_be_written_fails_no_benchmark(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, isolated_home: Path
) -> None:
    monkeypatch.setattr(localllm.bench.engine.plan, "measure", measure_rows)
    (isolated_home / "localllm").write_text("a file where the folder should be", encoding="utf-8")
    result = cli("bench", "m")
    assert result.code == 0
    assert result.out.startswith("| model")
    assert "not kept for `localllm bench history`" in result.err
