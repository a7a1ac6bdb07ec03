"""What a private request computed serves others from memory, and nothing of it, nor that it was, reaches the disk."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from localllm.runtime.config import TierConfig
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX
from localllm.runtime.kv.tiers import Tiers
from tests.fake_engine import SPEC, FakeEngine
from tests.runtime.harness import SPECS, Bench, truth

SYSTEM = [32 + i % 90 for i in range(100)]
SECRET = [200 + i for i in range(50)]  # ids that no answer has
OTHER = [126 - i for i in range(50)]


def _tiers(folder: Path, kind: str = "any", *, keeps_all: bool = True) -> Tiers:
    config = TierConfig(
        ram_bytes=1 << 24, block_tokens=16, disk_dir=str(folder), disk_bytes=1 << 24, keeps_all=keeps_all
    )
    return Tiers(config, spec=SPECS[kind], can_write_disk=True)


def _ask(tiers: Tiers, kind: str, prompt: list[int], **options: object) -> int:
    """Run a prompt with nothing on the device; return how many of its tokens the tiers gave."""
    answer = Bench(FakeEngine(SPECS[kind]), tiers=tiers).answer(prompt, max_tokens=2, **options)
    assert answer.choices[0].ids == truth(prompt, 2)
    return sum(answer.usage.cached_tokens.values())


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob(f"*{SUFFIX}")}


def _leaks(folder: Path, private: list[int]) -> set[int]:
    """Return which of the secret's tokens the files hold KV of: this engine's is the tokens themselves."""
    pairs = [(token, np.asarray([before, token], np.int32).tobytes()) for before, token in pairwise(private)]
    written = _files(folder).values()
    return {token for token, pair in pairs if token in SECRET and any(pair in data for data in written)}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("cache", ["on", "pin"])
@pytest.mark.parametrize("n_common", [5, 40, 64, 95, 96, 100])
def test_others_that_begin_like_a_private_prompt_put_none_of_it_on_disk(
    kind: str, cache: str, n_common: int, tmp_path: Path
) -> None:
    """Their last block in common is used in part: the rest of it is the secret's."""
    tiers = _tiers(tmp_path, kind)
    private, other = [*SYSTEM[:n_common], *SECRET], [*SYSTEM[:n_common], *OTHER]
    _ask(tiers, kind, private, is_private=True, cache=cache)
    n_found = [_ask(tiers, kind, other) for _ in range(2)]
    _ask(tiers, kind, [*other[:-3], 33], cache="pin")
    _ask(tiers, kind, private, is_private=True)
    tiers.close()
    assert n_found[0] == n_common or kind != "any"  # the control: it was used
    assert n_found[1] > n_common
    assert _leaks(tmp_path, private) == set()
    assert _files(tmp_path)


@pytest.mark.parametrize("n_more", [1, 16, 20])
def test_one_that_has_a_private_prompt_whole_keeps_its_own(n_more: int, tmp_path: Path) -> None:
    """The control of the test above: the same blocks, had whole by someone who wants them kept."""
    tiers = _tiers(tmp_path)
    private = [*SYSTEM, *SECRET]
    _ask(tiers, "any", private, is_private=True)
    assert _ask(tiers, "any", [*private, *OTHER[:n_more]]) == len(private)
    tiers.close()
    assert len(_leaks(tmp_path, private)) > 40


@pytest.mark.parametrize("cache", ["on", "pin"])
def test_a_private_request_leaves_no_trace_on_files_of_others(cache: str, tmp_path: Path) -> None:
    tiers = _tiers(tmp_path)
    _ask(tiers, "any", SYSTEM, cache="pin")
    _ask(tiers, "any", [*SYSTEM[:90], *OTHER])
    tiers.close()
    for path in _files(tmp_path):
        os.utime(path, (1e9, 1e9))
    before = {path: path.stat().st_mtime_ns for path in _files(tmp_path)}
    tiers = _tiers(tmp_path)
    assert _ask(tiers, "any", [*SYSTEM, *SECRET], is_private=True, cache=cache) == len(SYSTEM)
    assert _ask(tiers, "any", [*SYSTEM[:90], *OTHER, 33], is_private=True, cache=cache) == 140
    tiers.close()
    assert {path: path.stat().st_mtime_ns for path in _files(tmp_path)} == before


def test_no_request_is_written_because_a_private_one_came_after_it(tmp_path: Path) -> None:
    """A short prompt waits for its second use; that a private request pinned it, or had it again, is none."""
    tiers = _tiers(tmp_path, keeps_all=False)
    bench = Bench(FakeEngine(SPEC), tiers=tiers)
    bench.answer(SYSTEM, max_tokens=2)
    bench.answer(SYSTEM, max_tokens=2, is_private=True, cache="pin")
    bench.answer([*SYSTEM, *SECRET], max_tokens=2, is_private=True, cache="pin")
    tiers.close()
    assert _files(tmp_path) == {}


@pytest.mark.parametrize("n_more", [0, 1])
def test_what_is_pinned_in_private_pins_no_file_when_others_have_it_too(n_more: int, tmp_path: Path) -> None:
    """It stays in memory for whom it was pinned; others keep what is theirs like anything else."""
    tiers = _tiers(tmp_path)
    _ask(tiers, "any", SYSTEM, is_private=True, cache="pin")
    for _ in range(2):
        _ask(tiers, "any", [*SYSTEM, *OTHER[:n_more]])
    tiers.close()
    assert _files(tmp_path)
    assert not any(path.name.endswith(PINNED_SUFFIX) for path in _files(tmp_path))
    assert any(entry.note.is_pinned for entry in tiers._ram)  # the control
