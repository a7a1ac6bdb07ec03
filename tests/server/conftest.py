"""A server for the tests of a module, on the test engine or on a real model, and the official client for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.fakes import Running, serving
from tests.server.test_serving import Server


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The app in this process, on the test engine."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`localllm serve` on SmolLM2, called "smol"."""
    flags = ("--ctx", "2048", "--parallel", "4", "--threads", "1", "--alias", "smol")
    server = Server(tmp_path_factory.mktemp("real"), *flags, model=smollm2, fake_engine=False)
    try:
        yield server.ready()
    finally:
        server.kill()


@pytest.fixture
def base_url(running: Running) -> str:
    """Where `client` asks."""
    return running.url + "/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """The official client, which asks once."""
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client
