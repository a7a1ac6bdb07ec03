"""A hub of its own for every test, named by HF_ENDPOINT, and a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import certifi
import pytest

from localllm.models.reference import HubRef
from localllm.models.sources.download import Patience
from localllm.models.sources.hub import HubSource
from localllm.models.store import Store
from tests.fake_hub import FakeHub, gguf_bytes

REPO = "org/model-GGUF"
DATA = gguf_bytes(600_000)


@pytest.fixture(scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one certificate: loading all of a system's takes a tenth of a second a pull."""
    end = "-----END CERTIFICATE-----\n"
    bundle = Path(certifi.where()).read_text()
    path = tmp_path_factory.mktemp("ca") / "one.pem"
    path.write_text(bundle[bundle.index("-----BEGIN") :].split(end)[0] + end)
    return path


@pytest.fixture(autouse=True)
def plain_network(monkeypatch: pytest.MonkeyPatch, one_authority: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(one_authority))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        server.add(REPO, {"model-Q4_K_M.gguf": DATA, "README.md": b"hello"}, license="apache-2.0")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def source() -> Callable[..., HubSource]:
    """Make a hub source that loses no time: it sleeps not at all, and gives up on a stall soon."""

    def make(text: HubRef | None = None, **options: object) -> HubSource:
        ref = text or HubRef(REPO)
        settings: dict[str, object] = {"sleep": lambda _: None, "stall_s": 0.4, "patience": Patience(max_failures=3)}
        return HubSource(ref, ref.name, **{**settings, **options})  # type: ignore[arg-type]

    return make
