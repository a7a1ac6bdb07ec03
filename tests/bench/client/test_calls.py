from __future__ import annotations

import pytest

from localllm.bench.client.calls import Target
from localllm.errors import UsageError


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
        ("localhost:1234/v1/", "localhost", 1234, ""),
        ("http://[::1]:9/api/v1", "::1", 9, "/api"),
        ("http://box", "box", 80, ""),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str) -> None:
    target = Target.of_url(url)
    assert (target.host, target.port, target.prefix) == (host, port, prefix)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "", "http://[::1", "http://a..b", "http://me:secret@box/v1"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as told:
        Target.of_url(url)
    assert "secret" not in told.value.message


@pytest.mark.parametrize("key", ["a\nb", "k\u00e9y", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UsageError) as told:
        Target.of_url("http://box", key=key)
    assert key not in told.value.message


def test_a_prefix_is_quoted() -> None:
    assert Target.of_url("http://box/my models/\u00e4/v1").prefix == "/my%20models/%C3%A4"
