"""Looking at other engines' folders believes nothing that lies there, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.kv import survey
from localllm.runtime.kv.blocks import NO_ROOT
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import Tiers
from tests.fake_engine import SPEC

TOKENS = [at * 7 % 250 for at in range(300)]
DEEP = b"[" * 60_000
LONE = b'{"model": "m", "fingerprint": "\\ud800"}'  # half of a surrogate pair
OWN, OTHER = replace(SPEC, fingerprint="own"), replace(SPEC, fingerprint="other")


def tiers_in(folder: Path, spec: object = OWN, model_name: str = "m") -> Tiers:
    config = TierConfig(ram_bytes=1 << 20, disk_dir=str(folder), disk_bytes=1 << 24)
    return Tiers(config, spec=spec, model_name=model_name, can_write_disk=True)  # type: ignore[arg-type]


def fill(tiers: Tiers, n_tokens: int = 300) -> None:
    """Keep the blocks of the first tokens, pinned, and close: they lie on disk then."""
    chain = tiers.blank(NO_ROOT).chain
    for start in range(0, n_tokens, tiers.block_tokens):
        block = chain.block(TOKENS, start, min(n_tokens, start + tiers.block_tokens))
        tiers.put(block, b"kv" * block.n_tokens, Note(n_tokens, is_pinned=True))
    tiers.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Tiers]:
    tiers = tiers_in(tmp_path)
    yield tiers
    tiers.close()


def is_elsewhere(own: Tiers, n_least: int, tokens: list[int] = TOKENS) -> bool:
    return survey.is_held_elsewhere(own, OWN.fingerprint, "m", NO_ROOT, tokens, n_least)


@pytest.mark.parametrize("n_held", [10, 64, 100, 128, 300])
def test_what_lies_under_another_fingerprint_is_found_to_the_token(n_held: int, own: Tiers, tmp_path: Path) -> None:
    fill(tiers_in(tmp_path, OTHER), n_held)
    assert [n for n in range(1, 301) if is_elsewhere(own, n)] == list(range(1, n_held + 1))
    assert not is_elsewhere(own, 0)
    assert not is_elsewhere(own, 301)


def test_only_folders_of_the_same_model_and_another_fingerprint_count(own: Tiers, tmp_path: Path) -> None:
    fill(tiers_in(tmp_path, OTHER, "another model"))
    assert not is_elsewhere(own, 16)
    fill(tiers_in(tmp_path, OWN))
    assert not is_elsewhere(own, 16)


@pytest.mark.parametrize(
    "about",
    [b"", b"[]", b"{", b'{"model": "m"}', b'{"model": "m", "fingerprint": 5}', b"x" * 99999, DEEP, LONE],
)
def test_a_folder_that_says_nothing_sensible_is_passed_over(about: bytes, own: Tiers, tmp_path: Path) -> None:
    fill(tiers_in(tmp_path, OTHER))
    for path in tmp_path.glob("*/about.json"):
        path.write_bytes(about)
    assert not is_elsewhere(own, 16)


def test_links_and_pipes_are_not_followed(own: Tiers, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "one" / "about.json")
    (tmp_path / "two" / "about.json").symlink_to("/dev/zero")
    (tmp_path / "three" / "about.json").mkdir()
    assert not is_elsewhere(own, 16)


def test_damaged_files_are_left_as_they_are(own: Tiers, tmp_path: Path) -> None:
    fill(tiers_in(tmp_path, OTHER))
    files = sorted(tmp_path.rglob("*.kv"))
    for path in files:
        path.write_bytes(path.read_bytes()[:40])
    assert not is_elsewhere(own, 16)
    assert sorted(tmp_path.rglob("*.kv")) == files


def test_what_each_tier_holds_is_counted_from_the_front(own: Tiers) -> None:
    chain = own.blank(NO_ROOT).chain
    for start, private in ((0, False), (64, True), (192, False)):
        block = chain.block(TOKENS, start, start + 64)
        own.put(block, b"kv", Note(300, is_private=private, is_pinned=True))
    assert survey.kept_tokens(own, NO_ROOT, TOKENS)["ram"] == 128
    assert survey.held_tokens(own, NO_ROOT, TOKENS) == 128
    assert survey.held_tokens(own, ("", "salt"), TOKENS) == 0
    assert survey.held_tokens(own, NO_ROOT, [*TOKENS[:30], 5, *TOKENS[31:]]) == 30


def test_without_a_disk_there_is_no_elsewhere() -> None:
    tiers = Tiers(TierConfig(ram_bytes=1 << 20), spec=OWN)
    assert not is_elsewhere(tiers, 16)
    tiers.close()
