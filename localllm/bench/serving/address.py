"""Addresses of servers as people write them, with the model that `?model=NAME` chooses."""

from __future__ import annotations

import ipaddress
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

from localllm.errors import UsageError


def is_url(text: str) -> bool:
    """Say whether an argument names a server, not a model: with a scheme, or an address of a machine in front."""
    if "://" in text:
        return True
    try:
        host = urlsplit(f"//{text}").hostname or ""
        if host != "localhost":
            ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def without_choice(url: str) -> tuple[str, str | None]:
    """Return the address without its query, and the model that `?model=NAME` chooses. Raises UsageError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.username or parts.password:
        raise UsageError("An address holds no key.", "LOCALLLM_API_KEY=... localllm bench serve URL")
    query = parse_qs(parts.query)
    if set(query) - {"model"}:
        raise UsageError(f"{url}: only ?model=NAME may follow an address.", "http://127.0.0.1:8080?model=NAME")
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), query.get("model", [None])[0]


def chosen(url: str, model: str) -> str:
    """Return the address of one of a server's models; of its first where `model` is ""."""
    return f"{url}?model={quote(model, safe='')}" if model else url
