"""What lies on disk is listed for people whatever somebody has put there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.kv.blocks import Block
from localllm.runtime.kv.disk_about import read_about
from localllm.runtime.kv.disk_format import BadFile, file_parts, read_file, read_header, write_file
from localllm.runtime.kv.disk_list import prefixes
from tests.runtime.kv.disk_blocks import block_of, chain_of, files_in, tier, write


def plant(folder: Path, *blocks: Block) -> None:
    """Put blocks into an engine's folder whose files are whole, whatever they say."""
    disk = tier(folder)
    write(disk, block_of(99))
    for block in blocks:
        path = disk._index.place(block, is_pinned=False)
        path.parent.mkdir(exist_ok=True)
        write_file(path, file_parts(block, b"x", 2048), 1.0)
    disk.close(flush_s=1)


def test_beginnings_are_listed_whole_with_what_they_share(tmp_path: Path) -> None:
    disk, chain = tier(tmp_path / "kv"), chain_of(1, 3)
    write(disk, *chain, block_of(7, chain[0].key, 64), block_of(8, b"m" * 16, 64))
    disk.close(flush_s=1)
    kept = prefixes(tmp_path / "kv")
    assert sorted(one.n_tokens for one in kept) == [128, 192]
    assert {one.model for one in kept} == {"a model"}
    assert min(one.n_bytes for one in kept) > 2 * 4096


def test_blocks_that_follow_each_other_in_a_circle_are_no_beginning_and_hold_nobody_up(tmp_path: Path) -> None:
    first, second = block_of(1, start=128), block_of(2, start=64)
    first, second = replace(first, parent=second.key), replace(second, parent=first.key)
    plant(tmp_path / "kv", first, second, block_of(3, first.key, 192), block_of(4, block_of(99).key, 640))
    assert [one.n_tokens for one in prefixes(tmp_path / "kv")] == []


@pytest.mark.parametrize("wrong", [{"parent": block_of(1).key}, {"n_tokens": 0, "marks": b""}])
def test_a_block_that_follows_itself_or_holds_no_token_is_no_block(tmp_path: Path, wrong: dict[str, bytes]) -> None:
    path = tmp_path / "file"
    write_file(path, file_parts(replace(block_of(1), **wrong), b"x", 2048), 1.0)  # type: ignore[arg-type]
    for read in (read_header, read_file):
        with pytest.raises(BadFile):
            read(path)


def test_a_file_that_says_it_is_huge_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, block = tier(tmp_path / "kv"), block_of(1)
    write(disk, block)
    (path,) = files_in(tmp_path / "kv")
    head = file_parts(block, b"", 2048)[0]
    huge = bytearray(head)
    n_bytes = 1 << 42
    at = len(head) - len(block.marks) - 24
    huge[at : at + 8] = n_bytes.to_bytes(8, "little")
    import xxhash

    sums = xxhash.xxh3_64_intdigest(bytes(huge[: at + 8]) + block.marks).to_bytes(8, "little")
    huge[at + 8 : at + 16] = sums
    path.write_bytes(huge)
    os.truncate(path, len(head) + n_bytes)
    assert read_header(path).payload_bytes == n_bytes
    asked = list[int]()
    real = os.read

    def noted(fd: int, n_bytes: int) -> bytes:
        asked.append(n_bytes)
        return real(fd, n_bytes)

    monkeypatch.setattr(os, "read", noted)
    assert disk.read(block) is None
    assert max(asked) < 1 << 20
    disk.close(flush_s=1)


@pytest.mark.parametrize("text", ["", "[]", "5", "[" * 100_000, '{"model": "\\ud800"}', '{"model": 5}', "x" * 99_999])
def test_an_about_that_makes_no_sense_says_nothing(tmp_path: Path, text: str) -> None:
    plant(tmp_path / "kv", block_of(1))
    (path,) = (tmp_path / "kv").glob("*/about.json")
    path.write_text(text)
    assert read_about(path.parent) == {}
    assert {one.model for one in prefixes(tmp_path / "kv")} == {"?"}
