"""Our own small files survive any damage without a traceback, and are set aside once."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import pytest

from localllm.models.disk import record
from localllm.models.disk.record import Damaged, Newer

PAYLOAD = {"files": [{"name": "ü.gguf", "size_bytes": 5}], "note": None, "n": [1, 2.5, True]}


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record.save(tmp_path / "r.json", "test", 3, PAYLOAD, mode=0o600)
    assert record.load(tmp_path / "r.json", "test", 3) == PAYLOAD
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["r.json"]


def test_every_truncation_and_flip_is_noticed_or_harmless() -> None:
    data = record.encode("test", 3, PAYLOAD)
    rng = random.Random(1)
    for _ in range(400):
        bad = bytearray(data)
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        else:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(Damaged, Newer):
            assert record.decode(bytes(bad), "test", 3) == PAYLOAD


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000])
def test_rubbish_is_set_aside_and_told_once(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert record.load(path, "test", 3) is None
    assert record.load(path, "test", 3) is None
    assert (tmp_path / "r.json.bad").read_bytes() == content
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "circle"])
def test_what_is_no_file_is_set_aside_unread(tmp_path: Path, kind: str) -> None:
    path, outside = tmp_path / "r.json", tmp_path / "outside"
    record.save(outside, "test", 3, PAYLOAD)
    if kind == "folder":
        path.mkdir()
        (path / "inside").write_text("x")
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)
    assert record.load(path, "test", 3) is None
    assert not os.path.lexists(path)
    assert outside.is_file()


def test_a_record_of_a_later_version_is_left_for_its_owner(tmp_path: Path) -> None:
    record.save(tmp_path / "r.json", "test", 4, PAYLOAD)
    assert record.load(tmp_path / "r.json", "test", 3) is None
    assert record.load(tmp_path / "r.json", "test", 4) == PAYLOAD


def test_another_kind_or_version_is_no_record_of_ours() -> None:
    for data in (record.encode("other", 3, PAYLOAD), record.encode("test", 2, PAYLOAD)):
        with pytest.raises(Damaged):
            record.decode(data, "test", 3)
    with pytest.raises(Damaged):
        record.decode(json.dumps({"magic": "localllm test", "version": 3, "payload": {}}).encode(), "test", 3)


def test_a_missing_record_is_none(tmp_path: Path) -> None:
    assert record.load(tmp_path / "no" / "r.json", "test", 3) is None
    (tmp_path / "file").write_text("x")
    assert record.load(tmp_path / "file" / "r.json", "test", 3) is None
