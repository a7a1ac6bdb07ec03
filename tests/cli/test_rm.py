"""`localllm rm`: deletes what `pull` fetched, asks first, and touches nothing else."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.cli.app import run_command
from localllm.models.store import Store
from tests.cli.conftest import Result, Terminal
from tests.cli.test_ls import put
from tests.models.ggufs import small_model

Cli = Callable[..., Result]


def names() -> list[str]:
    return [model.name for model in Store().list()]


def test_yes_deletes_that_model_and_no_other(cli: Cli) -> None:
    folder = put("org/alpha")
    put("org/beta")
    result = cli("rm", "alpha", "--yes")
    assert (result.code, result.out) == (0, "")
    assert "removed org/alpha (Q4_K_M, abababababab" in result.err
    assert names() == ["org/beta"]
    assert not folder.exists()


def test_without_a_terminal_nothing_is_deleted_unasked(cli: Cli) -> None:
    put("org/alpha")
    result = cli("rm", "alpha", stdin="y\n")
    assert result.code == 2
    assert "--yes" in result.err
    assert names() == ["org/alpha"]


@pytest.mark.parametrize(("typed", "left"), [("y\n", []), ("YES\n", []), ("n\n", ["org/alpha"]), ("", ["org/alpha"])])
def test_at_a_terminal_only_yes_deletes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, left: list[str]
) -> None:
    put("org/alpha")
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(typed.encode()), encoding="utf-8"))
    assert run_command(["rm", "alpha"], main.VERBS, main.GROUPS) == 0
    assert "delete org/alpha (Q4_K_M" in capsys.readouterr().err
    assert names() == left


def test_ambiguous_name_deletes_nothing_and_names_the_candidates(cli: Cli) -> None:
    put("org/alpha")
    put("org/alphabet")
    result = cli("rm", "alph", "--yes")
    assert result.code == 2
    assert "org/alpha, org/alphabet" in result.err
    assert len(names()) == 2


def test_file_in_place_is_refused_and_stays(cli: Cli, tmp_path: Path) -> None:
    path = small_model().write(tmp_path / "mine.gguf")
    result = cli("rm", str(path), "--yes")
    assert result.code == 2
    assert "used in place" in result.err
    assert path.exists()


def test_model_of_another_tool_is_refused_and_stays(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--repo" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    path = small_model().write(snapshot / "repo-Q5_K_M.gguf")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = cli("rm", "org/repo", "--yes")
    assert result.code == 2
    assert "not localllm's to delete" in result.err
    assert path.exists()


def test_unknown_model_ends_with_3(cli: Cli) -> None:
    result = cli("rm", "nothing", "--yes")
    assert (result.code, result.err) == (3, "error: There is no stored model 'nothing'.\nhint: localllm ls\n")


def test_damaged_model_can_be_deleted(cli: Cli) -> None:
    folder = put("org/alpha")
    (folder / "provenance.json").write_text("{")
    assert cli("rm", "alpha", "--yes").code == 0
    assert names() == []


def test_unfinished_pull_can_be_deleted(cli: Cli) -> None:
    (Store().staging("org/late") / "x.gguf.part").write_bytes(b"x" * 5000)
    result = cli("rm", "org/late", "--yes")
    assert result.code == 0
    assert "the unfinished pull of org/late (5.0 kB)" in result.err
    assert Store().unfinished() == ()


def test_json_says_what_went(cli: Cli) -> None:
    put("org/alpha")
    assert cli("rm", "alpha", "--yes", "--json").json()["removed"] == "org/alpha"
