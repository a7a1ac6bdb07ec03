"""A small HTTP server that does one thing wrong: `python bad_server.py FAULT --port 0 --socket PATH ...`.

It stands for `localllm serve` where a check has to find the fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from localllm.worker import local_socket
from localllm.worker.protocol import Attached, Call, FrameReader, Result, pack


class Handler(BaseHTTPRequestHandler):
    """Lets everybody do everything."""

    fault = ""
    n_asked = 0

    def do_GET(self) -> None:
        """Answer any path."""
        if self.path == "/readyz" and Handler.fault == "never loads":
            self._reply(503, {"status": "failed", "error": {"message": "it is broken"}})
        elif self.path == "/readyz" and Handler.fault == "dies while loading":
            print("error: the model is broken", file=sys.stderr, flush=True)
            os._exit(3)
        else:
            self._reply(200, {"data": [{"id": "m"}], "status": "ok"})

    do_OPTIONS = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """Answer any body."""
        self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1))
        self.close_connection = True
        Handler.n_asked += 1
        faults: dict[str, Callable[[], None]] = {
            "refuses": lambda: self._reply(400, {"error": {"message": "no"}}),
            "breaks off": lambda: self._stream(["41"], ends=False),
            "fails late": lambda: self._stream(["41", None]),
            "says nothing": lambda: self._stream([]),
            "another answer": lambda: self._stream(["41", f" {Handler.n_asked}"]),
            "caches": lambda: self._stream(["41"], n_cached=7),
        }
        faults.get(Handler.fault, lambda: self._stream(["41", " 42"]))()

    def _stream(self, pieces: list[str | None], *, ends: bool = True, n_cached: int = 0) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": len(pieces),
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }
        chunks: list[Any] = [
            {"error": {"message": "too late"}} if piece is None else {"choices": [{"text": piece}]} for piece in pieces
        ]
        if ends:
            chunks += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        for chunk in chunks:
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if ends:
            self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", "*"))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def main() -> None:
    """Serve with the fault until asked to stop over the private socket."""
    Handler.fault = sys.argv[1]
    if Handler.fault == "does not start":
        sys.exit("error: there is no room for it")
    host = "0.0.0.0" if Handler.fault == "open to all" else "127.0.0.1"
    server = ThreadingHTTPServer((host, 0), Handler)
    others = [ThreadingHTTPServer(("127.0.0.1", 0), Handler)] if Handler.fault == "a second port" else []
    if Handler.fault == "leaves a process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], start_new_session=True)
        time.sleep(0.3)  # to be seen
    if Handler.fault == "leaves a file":
        Path(tempfile.mkdtemp(), "left").touch()
    path = Path(sys.argv[sys.argv.index("--socket") + 1])
    listener = local_socket.bind(path)
    if Handler.fault == "open socket":
        path.chmod(0o666)
    threading.Thread(target=_until_stopped, args=(server, listener, path), daemon=True).start()
    print(f"listening on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()
    for other in others:
        other.server_close()
    sys.exit(5 if Handler.fault == "ends badly" else 0)


def _until_stopped(server: ThreadingHTTPServer, listener: socket.socket, path: Path) -> None:
    while True:
        peer, _ = listener.accept()
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while data := peer.recv(4096):
                for frame in frames.feed(data):
                    if isinstance(frame, Call) and Handler.fault != "does not stop":
                        peer.sendall(pack(Result(frame.number)))
                        if Handler.fault != "leaves its socket":
                            path.unlink()
                        server.shutdown()
                    elif not isinstance(frame, Call):
                        peer.sendall(pack(Attached({})))


if __name__ == "__main__":
    main()
