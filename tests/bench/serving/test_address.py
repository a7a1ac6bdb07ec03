from __future__ import annotations

import pytest

from localllm.bench.serving.address import chosen, is_url, without_choice
from localllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://models.example/v1", True),
        ("127.0.0.1:8080", True),
        ("localhost:11434/v1", True),
        ("localhost", True),
        ("[::1]:8080", True),
        ("10.0.0.7", True),
        ("smollm2:135m", False),
        ("qwen", False),
        ("hf:org/repo:Q4_K_M", False),
        ("./localhost.gguf", False),
        ("models.example:8080", False),
        ("[broken", False),
        ("", False),
    ],
)
def test_an_argument_is_a_server_or_a_model(text: str, is_one: bool) -> None:
    assert is_url(text) is is_one


def test_an_address_may_choose_a_model() -> None:
    assert without_choice("http://h:1/v1?model=a%2Fb") == ("http://h:1/v1", "a/b")
    assert without_choice("127.0.0.1:8080") == ("http://127.0.0.1:8080", None)


@pytest.mark.parametrize("url", ["http://h?modell=x", "http://user:key@h"])
def test_an_address_holds_nothing_else(url: str) -> None:
    with pytest.raises(UsageError):
        without_choice(url)


def test_a_model_is_chosen_as_it_is_read() -> None:
    assert chosen("http://h:1", "a/b c") == "http://h:1?model=a%2Fb%20c"
    assert without_choice(chosen("http://h:1", "a/b c")) == ("http://h:1", "a/b c")
    assert chosen("http://h:1", "") == "http://h:1"
