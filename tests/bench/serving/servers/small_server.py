"""A server of two routes for tests of who starts servers: `small_server.py PORT [how it misbehaves]...`."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    """Lists one model; has no page about its health."""

    def do_GET(self) -> None:
        """Answer."""
        key = os.environ.get("SMALL_KEY", "")
        is_known = self.path == "/v1/models" and (not key or self.headers.get("authorization") == f"Bearer {key}")
        body = b'{"data":[{"id":"small"}]}' if is_known else b"{}"
        is_refused = self.path == "/v1/models" and not is_known
        self.send_response(200 if is_known else 401 if is_refused else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main(port: str, *manners: str) -> None:
    """Serve until killed, in the manners asked for."""
    if "child" in manners:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["PIDS"]).write_text(str(child.pid))
    if "stranger" in manners:  # a child that leaves its session and its parent, and heeds no SIGTERM
        code = (
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "os.setsid()\n"
            "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
            "time.sleep(600)\n"
        )
        subprocess.Popen([sys.executable, "-c", code, os.environ["PIDS"]])
    if "daemon" in manners:  # its parent ends, it leaves its session
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        Path(os.environ["PIDS"]).write_text(str(os.getpid()))
    if "deaf" in manners:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("a small server on", port, flush=True)
    if "dies" in manners:
        print("cannot read the model\nso it ends", os.environ.get("SOME_TOKEN", ""), file=sys.stderr, flush=True)
        raise SystemExit(7)
    if "silent" in manners:
        time.sleep(600)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
