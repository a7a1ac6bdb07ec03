"""What a contract is measured with: candidates get their own words, our environment, and no key that is not theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localllm.bench.contract.file import parse_contract
from localllm.bench.contract.models import FoundModel
from localllm.bench.contract.real_tools import RealTools
from localllm.bench.contract.terms import Contract
from localllm.errors import UsageError

SMALL_SERVER = Path(__file__).parents[1] / "serving" / "servers" / "small_server.py"
TEXT = f"""
version = 1
title = "t"
[[model]]
name = "m"
named = "org/model"
[[candidate]]
name = "started"
command = ["{sys.executable}", "{SMALL_SERVER}", "{{port}}"]
variables = {{ MODEL = "{{model}}" }}
serves = "small"
[[candidate]]
name = "given"
url = "http://127.0.0.1:1"
serves = "a b"
[[workload]]
use = "chat"
"""


def tools(folder: Path, key: str | None = None) -> tuple[Contract, RealTools]:
    contract = parse_contract(TEXT.encode(), source="c.toml", folder=folder)
    return contract, RealTools(contract, {"m": FoundModel("org/model")}, key)


def test_a_command_is_started_and_a_url_is_used_as_it_is(tmp_path: Path) -> None:
    contract, real = tools(tmp_path)
    started, given = contract.candidates
    with real.start(started) as running:
        assert running.name == "started"
        assert running.url.endswith("?model=small")
        assert running.pids()
    with real.start(given) as running:
        assert running.url == "http://127.0.0.1:1?model=a%20b"
        assert not running.can_restart
        with pytest.raises(UsageError):
            running.restart()


def test_candidates_get_the_environment_from_before_a_library_changed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    _, real = tools(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    assert "GOMP_SPINCOUNT" not in real.environment


def test_the_fingerprint_names_what_is_known_of_the_models(tmp_path: Path) -> None:
    _, real = tools(tmp_path)
    found = real.fingerprint()
    assert found["models"] == []
    assert found["model"] is None
    assert found["machine"]
    assert found["fingerprint_id"]
