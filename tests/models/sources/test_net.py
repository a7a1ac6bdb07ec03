"""Where a download may go: the rules, and the transport and lookup that obey them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from localllm.errors import DownloadFailed, UsageError
from localllm.models.sources import pulling, transport
from localllm.models.sources.hub import HubSource
from localllm.models.sources.net import Destination, Policy, Refused, is_public, origin_of, policy_for
from localllm.models.sources.transport import Interrupted, Transport
from localllm.models.store import Store
from tests.fake_hub import FakeHub, Fault
from tests.models.sources.conftest import DATA

HUB = "https://huggingface.co"
MIRROR = "http://10.0.0.7:8080"


def resolver(address: str) -> Callable[[str, int], Sequence[str]]:
    return lambda host, port: [address]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0"),
        *("fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "nonsense"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "18.160.10.5", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://huggingface.co/x", "gopher://x/", "data:text/plain,x", "//huggingface.co/x", ""),
        *(
            "http://huggingface.co/x",
            "http://169.254.169.254/latest/meta-data",
            "https://",
            "https://user:pw@cdn.example/x",
        ),
        *("https://cdn.example:99999/x", "https://cdn.example\\@evil/x", "https://cdn.example/a b", "https://[::1/x"),
    ],
)
def test_urls_that_are_refused_whatever_they_resolve_to(url: str) -> None:
    with pytest.raises(Refused):
        policy_for(HUB, named=False, resolve=resolver("1.1.1.1")).check(url)


@pytest.mark.parametrize(
    "host", ["localhost", "cdn.example", "127.1", "2130706433", "0x7f.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_https_to_a_local_address_is_refused_however_it_is_spelt(host: str) -> None:
    policy = policy_for(HUB, named=False, resolve=resolver("127.0.0.1"))
    with pytest.raises(Refused, match="local network"):
        policy.check(f"https://{host}/x")


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "127.1", "2130706433", "[::1]", "169.254.169.254"])
def test_a_proxy_is_not_asked_for_local_addresses(host: str) -> None:
    policy = policy_for(HUB, named=False, resolve=resolver("1.1.1.1"))
    with pytest.raises(Refused, match="local network"):
        policy.check(f"https://{host}/x", proxied=True)
    assert policy.check("https://cdn.example/x", proxied=True) == Destination(origin_of("https://cdn.example"), ())


def test_one_local_address_among_public_ones_is_enough_to_refuse() -> None:
    policy = policy_for(HUB, named=False, resolve=lambda host, port: ["1.1.1.1", "10.0.0.1"])
    with pytest.raises(Refused):
        policy.check("https://cdn.example/x")


def test_a_named_mirror_may_be_local_and_nothing_else_may() -> None:
    policy = policy_for(MIRROR, named=True, resolve=lambda host, port: [host])
    assert policy.check(f"{MIRROR}/x").addresses == ("10.0.0.7",)
    assert policy.check("https://10.0.0.7/x").addresses == ("10.0.0.7",)
    for url in ("http://10.0.0.7:8081/x", "http://10.0.0.8:8080/x", "https://10.0.0.7:9000/x", "http://1.1.1.1/x"):
        with pytest.raises(Refused):
            policy.check(url)
    assert policy.check("https://1.1.1.1/x").addresses == ("1.1.1.1",)


def test_the_hub_itself_is_refused_where_its_name_leads_home() -> None:
    with pytest.raises(Refused):
        policy_for(HUB, named=False, resolve=resolver("192.168.0.1")).check(f"{HUB}/x")


def test_the_token_goes_to_the_endpoint_only_and_never_less_protected() -> None:
    policy = policy_for(HUB, named=True)
    assert policy.may_carry_token(f"{HUB}/x")
    assert policy.may_carry_token("https://HUGGINGFACE.co:443/x")
    for url in ("http://huggingface.co/x", "https://cdn.huggingface.co/x", "https://huggingface.co:444/x"):
        assert not policy.may_carry_token(url)
    mirror = policy_for(MIRROR, named=True)
    assert mirror.may_carry_token(f"{MIRROR}/y")
    assert not mirror.may_carry_token("http://10.0.0.7:8081/y")


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "http://", "https://user@host"])
def test_an_endpoint_that_is_none_is_a_usage_error(endpoint: str) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        policy_for(endpoint, named=True)


@pytest.mark.parametrize("place", ["api", "resolve", "cdn"])
@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "http://169.254.169.254/latest",
        "http://127.0.0.1:1/x",
        "https://127.0.0.1:1/x",
        "//[::1]:1/x",
    ],
)
def test_no_redirect_leads_off_the_public_internet(
    hub: FakeHub, store: Store, source: Callable[..., HubSource], place: str, location: str
) -> None:
    hub.faults[place] = [Fault("redirect", location=location)]
    with pytest.raises(Refused):
        pulling.run(source(), store, None)
    assert store.list() == []
    assert len(hub.of(place)) == 1


def test_redirects_in_a_circle_end(hub: FakeHub, store: Store, source: Callable[..., HubSource]) -> None:
    hub.faults["resolve"] = [Fault("redirect", location="/org/x/resolve/main/y")] * 50
    with pytest.raises(DownloadFailed, match="redirected more than"):
        pulling.run(source(), store, None)


class AnyLoopback(Policy):
    """Treats a second server on this machine as another public host."""

    def check(self, url: str, *, proxied: bool = False) -> Destination:
        return Destination(origin_of(url), ("127.0.0.1",))


def test_a_token_never_reaches_another_host(
    hub: FakeHub, store: Store, source: Callable[..., HubSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with FakeHub() as cdn:
        cdn.blobs = hub.blobs
        hub.cdn_base = cdn.url.replace("127.0.0.1", "cdn.localhost")
        pulling.run(source(policy=AnyLoopback(origin_of(hub.url), True)), store, None)
        assert cdn.sent_bytes() == len(DATA)
        assert all("secret" not in str(one.headers) + one.path for one in cdn.requests)
    assert {one.headers["authorization"] for one in hub.requests} == {"Bearer hf_secret"}


def test_a_lookup_redirected_to_another_host_loses_its_token(
    hub: FakeHub, store: Store, source: Callable[..., HubSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with FakeHub() as other:
        other.repos, other.cards, other.blobs = hub.repos, hub.cards, hub.blobs
        hub.faults["api"] = [Fault("redirect", location=f"{other.url}/api/models/org/model-GGUF?blobs=true")]
        pulling.run(source(policy=AnyLoopback(origin_of(hub.url), True)), store, None)
        assert len(other.of("api")) == 1
        assert "authorization" not in other.of("api")[0].headers


def test_offline_asks_nobody(
    hub: FakeHub, store: Store, source: Callable[..., HubSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadFailed, match="HF_HUB_OFFLINE"):
        pulling.run(source(), store, None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    pulling.run(source(), store, None)
    n_requests = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pulling.run(source(), store, None)
    assert len(hub.requests) == n_requests


def test_an_unreachable_endpoint_is_a_sentence(
    store: Store, source: Callable[..., HubSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match="cannot be asked"):
        pulling.run(source(), store, None)


def test_proxies_and_their_exceptions_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert transport.proxy_for("https://huggingface.co/x") == "http://proxy.example:3128"
    assert transport.proxy_for("https://inside.example/x") is None
    assert transport.proxy_for("https://127.0.0.1/x") is None


def test_a_plain_http_proxy_carries_a_mirror(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hub.url.replace("http://", "http://me:pw@"))
    hub.faults["resolve"] = [Fault("status", status=404)]
    client = Transport(policy_for(MIRROR, named=True), token="t")
    with client.get(f"{MIRROR}/org/a/resolve/main/b", {}) as reply:
        assert reply.status == 404
    (request,) = hub.of("resolve")
    assert request.path == f"{MIRROR}/org/a/resolve/main/b"
    assert request.headers["proxy-authorization"].startswith("Basic ")


def test_an_https_download_asks_the_proxy_for_a_tunnel(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", hub.url)
    with pytest.raises(Interrupted, match="501"), Transport(policy_for(HUB, named=False)).get(f"{HUB}/x", {}):
        pass


def test_the_ca_variables_name_the_trusted_authorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert transport.certificates().verify_mode is ssl.CERT_REQUIRED
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "missing.pem"))
            with pytest.raises(UsageError, match=name):
                transport.certificates()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path))
    assert transport.certificates().cert_store_stats()["x509_ca"] == 0
    assert os.path.isdir(tmp_path)
