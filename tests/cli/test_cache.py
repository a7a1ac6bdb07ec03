"""`localllm cache`: on a folder alone, on a model loaded here, and on one in a running server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EngineSpec
from localllm.runtime.kv.blocks import NO_ROOT
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Tiers
from tests.cli.conftest import Result
from tests.fake_engine import SPEC

Cli = Callable[..., Result]
TOKENS = list(range(40, 140)) + [7] * 60


def _fill(spec: EngineSpec = SPEC) -> Path:
    """Write a sequence of 160 tokens into the default folder: two whole blocks and a half."""
    folder = Path(os.environ["LOCALLLM_HOME"]) / "kv"
    config = TierConfig(ram_bytes=0, disk_dir=str(folder), disk_bytes=1 << 24)
    tiers = Tiers(config, spec=spec, model_name="fake-model", can_write_disk=True)
    chain = tiers.look_up(NO_ROOT, TOKENS).chain
    for start in range(0, len(TOKENS), 64):
        block = chain.block(TOKENS, start, min(start + 64, len(TOKENS)))
        tiers.put(block, b"\x07" * 1000, Note(prefix_tokens=2000))
    tiers.close()
    return folder


def test_an_empty_folder(cli: Cli) -> None:
    assert cli("cache", "ls", "--json").json()["prefixes"] == []
    assert cli("cache", "stats", "--json").json()["disk"]["n_blocks"] == 0
    assert cli("cache", "clear").code == 0


def test_what_lies_there_is_listed_by_prefix_and_without_text(cli: Cli) -> None:
    _fill()
    [kept] = cli("cache", "ls", "--json").json()["prefixes"]
    assert (kept["model"], kept["n_tokens"], kept["is_pinned"]) == ("fake-model", 160, False)
    assert kept["n_bytes"] > 3000
    told = cli("cache", "ls")
    assert told.out.splitlines()[1].split()[:2] == ["fake-model", "160"]


def test_stats_count_the_folder(cli: Cli) -> None:
    folder = _fill()
    disk = cli("cache", "stats", "--json").json()["disk"]
    assert (disk["folder"], disk["n_blocks"]) == (str(folder), 3)
    assert disk["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.kv"))


def test_clear_leaves_no_block(cli: Cli) -> None:
    folder = _fill()
    assert cli("cache", "clear", "--json").json()["disk"]["n_blocks"] == 3
    assert not list(folder.rglob("*.kv"))


@pytest.mark.parametrize(
    ("text", "words"), [("", "no text"), ('{"messages": []}', "conversation"), ('{"prompt": 3}', "no text")]
)
def test_a_file_that_is_no_prompt_is_refused_before_anything_is_loaded(
    cli: Cli, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "f").write_text(text)
    told = cli("cache", "explain", "nothing", str(tmp_path / "f"))
    assert told.code == 2
    assert words in told.err


@pytest.mark.real
def test_warmed_text_is_found_by_the_next_process(cli: Cli, tmp_path: Path, smollm2: Path) -> None:
    from localllm.models.hashes import sha256_of

    sha256_of(smollm2)  # KV of a file without a known hash stays off the disk
    document = tmp_path / "doc.txt"
    document.write_text("".join(f"Rule {i}: be kind to number {i}.\n" for i in range(12)))
    warmed = cli("cache", "warm", str(smollm2), str(document), "--threads", "1", "--json").json()
    assert warmed["is_pinned"] is True
    assert warmed["n_computed_tokens"] == warmed["n_tokens"] == warmed["kept_tokens"]["disk"]
    told = cli("cache", "explain", str(smollm2), str(document), "--threads", "1", "--json").json()
    assert told["known_tokens"]["disk"] >= warmed["n_tokens"] - 4  # where the user's turn would begin
    assert cli("cache", "ls", "--json").json()["prefixes"][0]["is_pinned"] is True
