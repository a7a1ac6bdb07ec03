"""Sends unique strings in every place of a request and looks for them where none may be: `python -m proof.canary`.

Searched: the server's log, its pages (/metrics, /health, ...), error bodies and headers, every
process's command line, the server's environment and open files, and its folders. In between the
worker is ended by force, with requests in it.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm.models.catalog import DEFAULT_ALIAS
from proof.canary_requests import CHAT, Raw, requests
from proof.output import MEASURED, header, model_path, tell, write_json
from proof.processes import leave_nothing_when_terminated
from proof.serving import Serving, fake_engine, get

PAGES = ("/metrics", "/health", "/livez", "/readyz", "/v1/models", "/openapi.json")
N_AT_ONCE = 4
TIMEOUT_S = 120.0
MAX_FILE_BYTES = 64 << 20
NAMES = ("chat: unknown field", "chat: stream_options", "chat: key of logit_bias", "body: duplicate key")
"""Requests whose canary is the name of a field: errors and the list of ignored fields tell it to the caller."""
ABORTS = (signal.SIGABRT, signal.SIGSEGV)


@dataclass(frozen=True, slots=True)
class Needle:
    """What all canaries of a run have in common, and how it is found again in other spellings."""

    text: str

    def canary(self, number: int) -> str:
        """Return the canary of one request."""
        return f"{self.text}n{number:05d}z"

    def spellings(self) -> list[bytes]:
        """Return it plain, backwards, in hexadecimal, and in base64 at its three alignments."""
        plain = self.text.encode()
        coded = [base64.b64encode(b"x" * shift + plain)[(shift * 8 + 5) // 6 : -4] for shift in range(3)]
        return [plain, plain[::-1], plain.hex().encode(), *coded]

    def found_in(self, data: bytes) -> list[str]:
        """Return the canaries in `data`, or the kind of spelling in which there is one."""
        numbers = sorted(set(re.findall(rb"%sn(\d{5})z" % self.text.encode(), data)))
        if numbers:
            return [number.decode() for number in numbers]
        folded = data.lower()
        return [f"spelling {i}" for i, one in enumerate(self.spellings()) if one.lower() in folded]


@dataclass(slots=True)
class Search:
    """Looks in places and keeps what it found. `places`: how many of each kind it looked into.

    `told_back`: names of fields, told to the one who sent them.
    """

    needle: Needle
    kinds: Mapping[int, str]
    places: Counter[str] = field(default_factory=Counter)
    found: list[dict[str, str]] = field(default_factory=list)
    told_back: list[dict[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, kind: str, place: str, data: bytes) -> None:
        """Look into one place."""
        hits = self.needle.found_in(data)
        with self._lock:
            self.places[kind] += 1
            for hit in hits:
                of = self.kinds.get(int(hit), "?") if hit.isdigit() else hit
                is_name = kind == "answer" and place == of and of in NAMES
                found = self.told_back if is_name else self.found
                found.append({"where": kind, "place": place, "canary": hit, "request": of})


def exchange(url: str, raw: Raw) -> bytes:
    """Send one request on a socket of its own; return everything that came back."""
    parts = urlsplit(url)
    received = bytearray()
    with suppress(OSError), socket.create_connection((parts.hostname, parts.port), TIMEOUT_S) as sock:
        sock.settimeout(TIMEOUT_S)
        with suppress(OSError):
            sock.sendall(raw.bytes(f"{parts.hostname}:{parts.port}"))
        while data := sock.recv(1 << 16):
            received += data
    return bytes(received)


def status_of(answer: bytes) -> int:
    """Return the status of an answer; 0 for none."""
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    return int(found[1]) if found else 0


def what_may_hold_none(answer: bytes) -> bytes:
    """Return the parts of an answer that may hold no text of a request: headers, and errors.

    A text that the model says, or that was asked for (an echo, tokens, a rendered prompt), is the caller's.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    if status_of(answer) >= 400:
        return answer
    errors = [line for line in body.split(b"\n") if b'"error"' in line]
    return head + b"\n".join(errors)


@dataclass(slots=True)
class Sender:
    """Sends the requests of one server."""

    url: str
    search: Search
    statuses: Counter[int] = field(default_factory=Counter)

    def send(self, number: int, name: str, raw: Raw) -> None:
        """Send one, and look at what came back."""
        answer = exchange(self.url, raw)
        with self.search._lock:
            self.statuses[status_of(answer)] += 1
        self.search.look("answer", name, what_may_hold_none(answer))


def requests_of(needle: Needle, first: int, n: int) -> Iterator[tuple[int, str, Raw]]:
    """Yield `n` requests, all kinds in turn, each with a canary of its own."""
    n_kinds = len(requests(""))
    for number in range(first, first + n):
        kinds = requests(needle.canary(number))
        name = list(kinds)[number % n_kinds]
        yield number, name, kinds[name]


def abort(serving: Serving, sender: Sender, needle: Needle, numbers: Iterable[int], ends_by: signal.Signals) -> None:
    """End the worker by force while it works on requests that hold canaries."""
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        for number in numbers:
            body = {"messages": [{"role": "user", "content": f"Write a long story about {needle.canary(number)}."}]}
            body |= {"max_tokens": 400, "stream": number % 2 == 0}  # type: ignore[dict-item]
            pool.submit(sender.send, number, "in a worker that dies", Raw(CHAT, json.dumps(body).encode()))
        time.sleep(0.5)
        for worker in serving.workers():
            os.kill(worker, ends_by)


def look_everywhere(serving: Serving, search: Search) -> None:
    """Look into everything outside the answers."""
    for page in PAGES:
        search.look("page", page, exchange(serving.url, Raw(page, None)))
    for pid in [serving.pid, *serving.workers()]:
        search.look("environment", str(pid), _read(Path(f"/proc/{pid}/environ")))
        for descriptor in _names(Path(f"/proc/{pid}/fd")):
            if _is_ours(descriptor, serving.folder):
                search.look("open file", f"{pid}/{descriptor.name}", _read(descriptor))
    for process in _names(Path("/proc")):
        if process.name.isdigit():
            search.look("command line", process.name, _read(process / "cmdline"))


def look_into_folders(serving: Serving, search: Search) -> None:
    """Look into the log and all files that the server could have left, and at their names."""
    search.look("log", "serve.log", serving.log.read_bytes())
    for root in (serving.folder, Path("/dev/shm")):
        for folder, folders, files in os.walk(root):
            search.look("names", folder, "\n".join([*folders, *files]).encode())
            for file in files:
                path = Path(folder, file)
                if path != serving.log and path.is_file() and not path.is_symlink():
                    search.look("file", str(path.relative_to(root)), _read(path))


def _is_ours(descriptor: Path, folder: Path) -> bool:
    """Say whether it is memory, or a file that the server could have made: no socket, no terminal, no model."""
    with suppress(OSError):
        return os.readlink(descriptor).startswith(("/memfd:", "/dev/shm/", f"{folder}/"))
    return False


def _names(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _read(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(MAX_FILE_BYTES)
    return b""


def run_server(serving: Serving, search: Search, needle: Needle, first: int, n: int) -> dict[str, Any]:
    """Send `n` requests to a server and end its worker twice; return how they were answered."""
    sender = Sender(serving.url, search)
    n_aborted = 2 * N_AT_ONCE
    plain = list(requests_of(needle, first, n - n_aborted))
    halves = (plain[: len(plain) // 2], plain[len(plain) // 2 :])
    numbers = list(range(first + n - n_aborted, first + n))
    for half, ends_by in zip(halves, ABORTS, strict=True):
        with ThreadPoolExecutor(N_AT_ONCE) as pool:
            for request in half:
                pool.submit(sender.send, *request)
        look_everywhere(serving, search)
        aborted, numbers = numbers[:N_AT_ONCE], numbers[N_AT_ONCE:]
        abort(serving, sender, needle, aborted, ends_by)
        await_ready(serving)
    look_everywhere(serving, search)
    serving.stop()
    look_into_folders(serving, search)
    return {"statuses": {str(k): v for k, v in sorted(sender.statuses.items())}, "exit_code": serving.exit_code}


def await_ready(serving: Serving) -> None:
    """Wait until the worker is back, a minute at most."""
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s and get(serving.target(timeout_s=10.0), "/readyz").status != 200:
        time.sleep(0.2)


def run(model: Path, n: int, variables: Mapping[str, str], arguments: list[str]) -> dict[str, Any]:
    """Send `n` requests, half to a server that logs text and half to one that logs JSON."""
    needle = Needle("q" + secrets.token_hex(6))
    names = list(requests(""))
    kinds = {number: names[number % len(names)] for number in range(n)}
    search = Search(needle, kinds)
    servers = []
    for first, count, log_format in ((0, n // 2, "text"), (n // 2, n - n // 2, "json")):
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            flags = [str(model), "--log-format", log_format, *arguments]
            with Serving(Path(folder), flags, variables) as serving:
                tell(f"{count} requests, log as {log_format}")
                servers.append(run_server(serving, search, needle, first, count))
    return {
        "sent": n,
        "kinds": len(names),
        "found": len(search.found),
        "where": search.found,
        "told_back": len(search.told_back),
        "places": dict(search.places),
        "servers": servers,
        "search_works": search_works(needle),
    }


def search_works(needle: Needle) -> bool:
    """Say whether the search finds what is planted: plain, in base64, in hexadecimal."""
    plain = f"before {needle.canary(7)} after".encode()
    coded = base64.b64encode(b"some text, then " + plain)
    others = (coded, plain.hex().encode(), plain[::-1], plain.upper())
    return needle.found_in(plain) == ["00007"] and all(needle.found_in(data) for data in others)


def main(arguments: list[str]) -> int:
    """Run it; return 0 where no canary was found and nothing was answered with a 500."""
    parser = argparse.ArgumentParser(prog="python -m proof.canary", description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--fake", action="store_true", help="on an engine that computes nothing")
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "canary.json")
    wishes = parser.parse_args(arguments)
    model = model_path(wishes.model)
    head = header("canary", model, fake=wishes.fake)
    variables = fake_engine(5.0) if wishes.fake else {}
    found = run(model, wishes.requests, variables, ["--threads", wishes.threads])
    write_json(wishes.output, head | found)
    tell(f"{wishes.output}")
    print(json.dumps(found, indent=1))
    n_500 = sum(server["statuses"].get("500", 0) for server in found["servers"])
    return 1 if found["found"] or n_500 or not found["search_works"] else 0


if __name__ == "__main__":
    leave_nothing_when_terminated()
    sys.exit(main(sys.argv[1:]))
