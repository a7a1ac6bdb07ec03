"""Fixtures every test may use: the shared material, the real model, and a user directory of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

PROJECT = Path(__file__).resolve().parent.parent


# The store of the user who runs the tests, read before they are isolated from it.
_HOME = Path(os.environ.get("LOCALLLM_HOME") or platformdirs.user_data_path("localllm"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout: tiny models, vocabularies, templates."""
    path = PROJECT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder `shared` beside the checkout")
    return path


@pytest.fixture(scope="session")
def tiny(shared: Path) -> Path:
    """The folder of tiny random models, one an architecture."""
    return shared / "models" / "tiny"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct as `make model` fetched it."""
    named = os.environ.get("LOCALLLM_TEST_MODEL")
    if named:
        return Path(named)
    found = [path for path in sorted(_HOME.rglob("*.gguf")) if "smollm2" in str(path).lower()]
    if not found:
        pytest.skip("needs SmolLM2: make model")
    return found[0]


@pytest.fixture(scope="session", autouse=True)
def heeded_interrupt() -> None:
    """Let tests send signals also where a shell's background or nohup had them ignored for all below."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Let the many processes that tests start compile our modules once, also where CI writes no bytecode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a user directory of its own, and none of the user's settings."""
    home = tmp_path_factory.mktemp("home")
    for name in [n for n in os.environ if n.startswith(("LOCALLLM_", "HF_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOCALLLM_HOME", str(home / "localllm"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "run"))
    return home
