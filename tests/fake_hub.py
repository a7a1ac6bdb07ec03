"""A small real HTTP server that speaks the hub's API and can be told to misbehave.

It serves what huggingface-hub 2.x asks for (a model's facts with blobs) and the addresses that hold the
bytes: `/ORG/REPO/resolve/REVISION/FILE` redirects to `/cdn/SHA256`, as the hub does for large files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


def gguf_bytes(n_bytes: int, seed: int = 1, **metadata: str) -> bytes:
    """Return a well-formed GGUF of about `n_bytes`: a few keys and one F32 tensor of pseudo-random data."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    keys = {"general.architecture": "llama", "general.name": "fake", **metadata}
    n_values = max(8, n_bytes // 4)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys))
    for key, value in keys.items():
        head += text(key) + struct.pack("<I", 8) + text(value)
    head += text("blob") + struct.pack("<IQIQ", 1, n_values, 0, 0)
    head += b"\0" * (-len(head) % 32)
    return head + hashlib.shake_128(seed.to_bytes(8, "little")).digest(n_values * 4)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request, once. `kind` names it; `at` is a byte of the body where that matters.

    cut, stall, short (Content-Length too small), long (too large), redirect, status, ignore_range, new_etag,
    wrong_etag (206 with another mark), wrong_range, flip, gzip, extra (more bytes than promised)
    """

    kind: str
    at: int = 0
    status: int = 503
    location: str = ""
    seconds: float = 5.0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request as it came, and how much of its body went out."""

    place: str
    path: str
    headers: dict[str, str]
    sent: int = 0


class FakeHub:
    """The server. `faults[place]` ("api", "resolve", "cdn") are used up in order, one a request."""

    def __init__(self, *, bytes_per_s: float = 0.0) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.plain: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.requests: list[Request] = []
        self.bytes_per_s = bytes_per_s
        self.cdn_base = ""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may hang up
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, repo: str, files: Mapping[str, bytes], *, plain: bool = False, **card: Any) -> str:
        """Serve a repository; `plain` files are git blobs, not LFS. Returns its commit."""
        self.repos[repo] = dict(files)
        self.cards[repo] = card
        if plain:
            self.plain.add(repo)
        self.blobs.update({hashlib.sha256(data).hexdigest(): data for data in files.values()})
        return self.commit(repo)

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1(repo.encode())
        for name, data in sorted(self.repos[repo].items()):
            digest.update(name.encode() + hashlib.sha256(data).digest())
        return digest.hexdigest()

    def sent_bytes(self, place: str = "cdn") -> int:
        return sum(one.sent for one in self.requests if one.place == place)

    def of(self, place: str) -> list[Request]:
        return [one for one in self.requests if one.place == place]

    def next_fault(self, place: str) -> Fault | None:
        with self._lock:
            return self.faults[place].pop(0) if self.faults[place] else None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _handler_for(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(head=True)

        def do_GET(self, head: bool = False) -> None:
            path = unquote(urlsplit(self.path).path)
            place = "api" if path.startswith("/api/") else "cdn" if path.startswith("/cdn/") else "resolve"
            request = Request(place, self.path, {k.lower(): v for k, v in self.headers.items()})
            hub.requests.append(request)
            fault = hub.next_fault(place)
            try:
                if fault and fault.kind == "status":
                    self._answer(fault.status, b"", fault.headers, head)
                elif fault and fault.kind == "redirect":
                    self._answer(302, b"", {"Location": fault.location}, head)
                elif place == "api":
                    self._api(path, head)
                elif place == "resolve":
                    self._resolve(path, head)
                else:
                    self._cdn(path.removeprefix("/cdn/"), fault, request, head)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _answer(self, status: int, body: bytes, headers: Mapping[str, str], head: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not head:
                self.wfile.write(body)

        def _api(self, path: str, head: bool) -> None:
            parts = path.split("/")
            repo = "/".join(parts[3:5])
            if repo not in hub.repos:
                return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, head)
            revision = "/".join(parts[6:]) or "main"
            if revision not in ("main", hub.commit(repo)):
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, head)
            siblings = []
            for name, data in hub.repos[repo].items():
                sha256 = hashlib.sha256(data).hexdigest()
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
                if repo not in hub.plain:
                    sibling["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
                siblings.append(sibling)
            facts = {"id": repo, "sha": hub.commit(repo), "siblings": siblings, "tags": [], "cardData": hub.cards[repo]}
            return self._answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"}, head)

        def _resolve(self, path: str, head: bool) -> None:
            org, repo, _, revision, name = path[1:].split("/", 4)
            data = hub.repos.get(f"{org}/{repo}", {}).get(name)
            if data is None or revision not in ("main", hub.commit(f"{org}/{repo}")):
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"}, head)
            sha256 = hashlib.sha256(data).hexdigest()
            headers = {
                "X-Repo-Commit": hub.commit(f"{org}/{repo}"),
                "X-Linked-Size": str(len(data)),
                "X-Linked-Etag": f'"{sha256}"',
                "Location": f"{hub.cdn_base}/cdn/{sha256}",
            }
            return self._answer(302, b"", headers, head)

        def _cdn(self, sha256: str, fault: Fault | None, request: Request, head: bool) -> None:
            kind = fault.kind if fault else ""
            data = hub.blobs[sha256]
            etag = '"changed"' if kind in ("new_etag", "wrong_etag") else f'"{sha256[:16]}"'
            start = self._range_start(etag, kind)
            if start is not None and start >= len(data):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"}, head)
            body = data[start or 0 :]
            if kind == "flip":
                at = fault.at % len(body)
                body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            headers = {"ETag": etag, "Accept-Ranges": "bytes"}
            if start is not None:
                shown = start + 1 if kind == "wrong_range" else start
                headers["Content-Range"] = f"bytes {shown}-{len(data) - 1}/{len(data)}"
            if kind == "gzip":
                body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            if kind == "extra":
                body += b"more"
            promised = len(body) + {"short": -1000, "long": 1000}.get(kind, 0)
            self.send_response(200 if start is None else 206)
            for name, value in headers.items():
                self.send_header(name, value)
            if kind == "extra":
                self.send_header("Connection", "close")
                self.close_connection = True
            else:
                self.send_header("Content-Length", str(promised))
            self.end_headers()
            if not head:
                self._send(body[:promised], fault, kind, request)
            return None

        def _range_start(self, etag: str, kind: str) -> int | None:
            wanted = self.headers.get("Range")
            if_range = self.headers.get("If-Range")
            if not wanted or kind == "ignore_range" or (if_range and if_range != etag and kind != "wrong_etag"):
                return None
            return int(wanted.removeprefix("bytes=").split("-")[0])

        def _send(self, body: bytes, fault: Fault | None, kind: str, request: Request) -> None:
            end = min(fault.at, len(body)) if fault and kind in ("cut", "stall") else len(body)
            started, step = time.monotonic(), 32 << 10
            for at in range(0, end, step):
                piece = body[at : min(at + step, end)]
                self.wfile.write(piece)
                request.sent += len(piece)
                if hub.bytes_per_s:
                    time.sleep(max(0.0, started + (at + len(piece)) / hub.bytes_per_s - time.monotonic()))
            if fault and kind == "stall":
                time.sleep(fault.seconds)
            if kind in ("cut", "stall", "long"):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler
