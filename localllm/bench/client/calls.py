"""What is sent to an endpoint, and what became of it."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from localllm.errors import UsageError


class End(Enum):
    """How an exchange ended. The last four are never right."""

    ANSWER = "answer"
    REFUSED = "refused"  # an HTTP status of 400 or more, with a proper error
    ERROR_EVENT = "error_event"  # a stream that ended with an error in it
    CANCELLED = "cancelled"  # by us, as was asked
    LOST = "lost"  # the connection ended, or the answer did, before its proper end
    MALFORMED = "malformed"  # it broke a rule of HTTP, of event streams or of the API
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"

    @property
    def is_proper(self) -> bool:
        """Whether the request ended in exactly one answer, error event, refusal or cancel."""
        return self in (End.ANSWER, End.REFUSED, End.ERROR_EVENT, End.CANCELLED)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `prefix` stands before every path; `headers` go with every request."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0

    @classmethod
    def of_url(
        cls, url: str, *, key: str | None = None, timeout_s: float = 600.0, tls: ssl.SSLContext | None = None
    ) -> Target:
        """Return the target of `http://host:port/v1` or a server's root. Raises UsageError."""
        wrong = UsageError(f"{_without_login(url)} is no address of a server.", "http://127.0.0.1:8080")
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode()
        except ValueError:  # UnicodeError too
            raise wrong from None
        if parts.scheme not in ("http", "https") or not host or port == 0:
            raise wrong
        if parts.username is not None:
            raise UsageError("A URL of a server holds no name or password here.", "export LOCALLLM_API_KEY=...")
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError("The API key holds what no header can carry.", "export LOCALLLM_API_KEY=... again")
        context = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        headers = (("authorization", f"Bearer {key}"),) if key else ()
        prefix = quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%:@!$&'()*+,;=~")
        return cls(host, port or (443 if context else 80), prefix, context, headers, timeout_s)

    @property
    def is_here(self) -> bool:
        """Whether the host is this machine: loopback, or no address in particular."""
        if self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return address.is_loopback or address.is_unspecified


def _without_login(url: str) -> str:
    """Return `url` as it may be shown: nothing before an @ in it."""
    return url.rpartition("@")[2] if "@" in url else url


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. `body` None = GET.

    `cancel_after_s` and `cancel_after_events`: the connection is closed then, whatever there is.
    `label` comes back in the outcome; `keep_text` keeps the answer's text there.
    """

    path: str
    body: bytes | None
    headers: tuple[tuple[str, str], ...] = ()
    label: str = ""
    cancel_after_s: float | None = None
    cancel_after_events: int | None = None
    keep_text: bool = False

    @classmethod
    def of(cls, path: str, fields: Mapping[str, Any], **settings: Any) -> Call:
        """Return a POST of `fields` as JSON."""
        return cls(path, msgspec.json.encode(fields), **settings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call. Times are time.perf_counter(); tokens None = the endpoint did not say.

    `due_s`: when it was to be sent (an open loop's clock), `started_s`: when it was. `fault`: why
    the end is not a proper one. `text` is "" unless it was asked for. `n_sends`: 2 where the
    connection turned out to have been closed while it was idle. `ended_s`: when the last byte of
    the answer came. `accepted_draft_tokens`, `rejected_draft_tokens`: what became of the server's
    speculation. `tool_calls`: whether the answer called a tool.
    """

    label: str
    client: int
    end: End
    is_stream: bool
    status: int | None
    due_s: float
    started_s: float
    ended_s: float
    token_s: tuple[float, ...] = ()
    answer_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    rejected_draft_tokens: int | None = None
    tool_calls: bool = False
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    error_message: str = ""
    retry_after_s: float | None = None
    request_id: str | None = None
    timings: Mapping[str, Any] | None = None
    n_comments: int = 0
    fault: str = ""
    text: str = ""
    n_sends: int = 1

    @property
    def output_tokens(self) -> int:
        """The answer's tokens as the server counts them, else one a piece."""
        return len(self.token_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def failure_code(self) -> str | None:
        """The code behind a refusal or an error event ("status 500" where it has none); None for other ends."""
        if self.end not in (End.REFUSED, End.ERROR_EVENT):
            return None
        return self.error_code or f"status {self.status}"
