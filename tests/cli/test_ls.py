"""`localllm ls`: every model that is here, whatever else lies around."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.models.provenance import Provenance, StoredFile, now
from localllm.models.store import Store
from tests.cli.conftest import Result
from tests.models.ggufs import small_model

Cli = Callable[..., Result]
SHA256 = "ab" * 32


def put(name: str, quant: str | None = "Q4_K_M") -> Path:
    """Store a small model the way a pull does; return its folder."""
    store = Store()
    staging = store.staging(name)
    path = small_model().write(staging / f"model-{quant}.gguf")
    file = StoredFile(path.name, path.stat().st_size, SHA256)
    facts = Provenance(name, f"hf:{name}", "c0ffee", "mit", quant, "someone", None, now(), (file,))
    return store.publish(staging, facts).folder


def test_empty_store_says_what_to_do(cli: Cli) -> None:
    result = cli("ls")
    assert (result.code, result.out) == (0, "")
    assert "localllm pull smollm2:135m" in result.err


def test_each_row_names_quantisation_size_hash_and_source(cli: Cli) -> None:
    put("org/b")
    put("org/a", "Q8_0")
    lines = cli("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "QUANT", "SIZE", "SHA256", "SOURCE"]
    assert lines[1].split()[:2] == ["org/a", "Q8_0"]
    assert lines[2].split()[0] == "org/b"
    assert SHA256[:12] in lines[1]
    assert lines[1].split()[-1] == "hf:org/a"


def test_json_holds_the_whole_hash_and_the_provenance(cli: Cli) -> None:
    put("org/a")
    (row,) = cli("ls", "--json").json()["models"]
    assert (row["name"], row["sha256"], row["quant"], row["license"], row["in"]) == (
        "org/a",
        SHA256,
        "Q4_K_M",
        "mit",
        "store",
    )


def test_models_of_other_tools_are_listed_with_their_tool(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--repo" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    small_model().write(snapshot / "repo-Q5_K_M.gguf")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = cli("ls")
    row = result.out.splitlines()[1]
    assert row.split()[:2] == ["org/repo:Q5_K_M", "Q5_K_M"]
    assert "not hashed yet" in row
    assert row.endswith("Hugging Face cache")
    assert cli("ls", "--json").json()["models"][0]["sha256"] is None


def test_rubbish_in_the_store_hides_no_model_and_is_told(cli: Cli) -> None:
    put("org/good")
    broken = put("org/broken")
    (broken / "provenance.json").write_text("{")
    cut = put("org/cut")
    next(cut.glob("*.gguf")).chmod(0o644)
    next(cut.glob("*.gguf")).write_bytes(b"GGUF")
    models = Store().models
    (models / "a file").write_text("x")
    (models / "empty").mkdir()
    (models / "circle").symlink_to(models / "circle")
    (models / "line\nbreak\x1b[31m").mkdir()
    result = cli("ls")
    assert result.code == 0
    assert "org/good" in result.out
    assert "org/cut cannot be used" in result.err
    assert "\x1b" not in result.out + result.err
    assert cli("ls", "--json").code == 0


def test_unfinished_pull_is_told(cli: Cli) -> None:
    (Store().staging("org/late") / "x.gguf.part").write_bytes(b"x" * 5000)
    result = cli("ls")
    assert "unfinished pulls: 1, 5.0 kB" in result.err
    assert cli("ls", "--json").json()["unfinished"][0]["size_bytes"] == 5000


def test_listing_reads_no_model_and_loads_no_engine(isolated_home: Path) -> None:
    put("org/a")
    script = (
        "import sys\nfrom localllm.cli import main\nfrom localllm.cli.app import run_command\n"
        "run_command(['ls'], main.VERBS, main.GROUPS)\n"
        "print(sorted({'numpy', 'llama_cpp', 'jinja2', 'rich', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
