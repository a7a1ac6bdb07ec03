"""Hashes are remembered as long as the file is the same, and no longer."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from localllm.models import hashes
from localllm.models.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def settled(path: Path, content: bytes) -> Path:
    """Write a file as it would be some seconds later."""
    path.write_bytes(content)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    real = hashes.hash_file
    monkeypatch.setattr(hashes, "hash_file", lambda path: (read.append(path), real(path))[1])
    return read


def test_a_file_is_read_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    path = settled(tmp_path / "m.gguf", b"data")
    expected = hashlib.sha256(b"data").hexdigest()
    assert hashes.known(path, store) is None
    assert [hashes.sha256_of(path, store) for _ in range(3)] == [expected] * 3
    assert hashes.known(path, store) == expected
    assert read == [path]
    assert (store.cache / "hashes.json").stat().st_mode & 0o777 == 0o600


def test_a_changed_replaced_or_fresh_file_is_read_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch)
    path = settled(tmp_path / "m.gguf", b"data")
    hashes.sha256_of(path, store)
    path.write_bytes(b"atad")
    os.utime(path, (1_700_000_009, 1_700_000_009))
    assert hashes.known(path, store) is None
    assert hashes.sha256_of(path, store) == hashlib.sha256(b"atad").hexdigest()
    other = settled(tmp_path / "other", b"DATA")
    os.utime(other, (1_700_000_009, 1_700_000_009))
    os.replace(other, path)
    assert hashes.sha256_of(path, store) == hashlib.sha256(b"DATA").hexdigest()
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"x")
    hashes.sha256_of(fresh, store)
    hashes.sha256_of(fresh, store)
    assert len(read) == 5


def test_a_file_rewritten_in_place_with_its_time_set_back_is_read_again(store: Store, tmp_path: Path) -> None:
    path = settled(tmp_path / "m.gguf", b"data")
    hashes.sha256_of(path, store)
    time.sleep(0.05)  # some clocks of file systems tick so slowly
    settled(path, b"atad")
    assert hashes.known(path, store) is None
    assert hashes.sha256_of(path, store) == hashlib.sha256(b"atad").hexdigest()


def test_a_fresh_file_is_learnt_once_it_has_settled(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_SETTLED_NS", 200_000_000)
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"x")
    assert hashes.learn(fresh, store)
    assert hashes.known(fresh, store) == hashlib.sha256(b"x").hexdigest()


def test_a_file_from_the_future_is_not_waited_for(store: Store, tmp_path: Path) -> None:
    path = settled(tmp_path / "m.gguf", b"data")
    os.utime(path, (4_000_000_000, 4_000_000_000))
    assert not hashes.learn(path, store)


@pytest.mark.parametrize("damage", [b"", b"garbage", b'{"magic": "localllm hashes"}', b"\x00" * 1000])
def test_a_damaged_cache_costs_a_hash_only(store: Store, tmp_path: Path, damage: bytes) -> None:
    path = settled(tmp_path / "m.gguf", b"data")
    hashes.sha256_of(path, store)
    (store.cache / "hashes.json").write_bytes(damage)
    assert hashes.known(path, store) is None
    assert hashes.sha256_of(path, store) == hashlib.sha256(b"data").hexdigest()
    assert hashes.known(path, store) is not None


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the store should be")
    path = settled(tmp_path / "m.gguf", b"data")
    assert hashes.sha256_of(path, Store(tmp_path / "home")) == hashlib.sha256(b"data").hexdigest()


def test_links_and_spellings_share_one_entry(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    path = settled(tmp_path / "m.gguf", b"data")
    (tmp_path / "link").symlink_to(path)
    hashes.sha256_of(tmp_path / "link", store)
    hashes.sha256_of(tmp_path / "." / "m.gguf", store)
    assert len(read) == 1


def test_the_cache_is_bounded_and_forgets_the_oldest(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "_MAX_ENTRIES", 3)
    paths = [settled(tmp_path / f"{name}.gguf", name.encode()) for name in "zyxw"]
    for path in paths:
        hashes.sha256_of(path, store)
    assert [hashes.known(path, store) is not None for path in paths] == [False, True, True, True]


def test_many_at_once_lose_nothing(store: Store, tmp_path: Path) -> None:
    paths = [settled(tmp_path / f"{n}.gguf", b"%d" % n) for n in range(6)]
    threads = [threading.Thread(target=hashes.sha256_of, args=(path, store)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(hashes.known(path, store) for path in paths)


def test_a_missing_file_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hashes.sha256_of(tmp_path / "none", store)
    assert hashes.known(tmp_path / "none", store) is None
