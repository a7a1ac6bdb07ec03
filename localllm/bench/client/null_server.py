"""A server that costs next to nothing: it answers chat streams at once, so that what is measured is the client.

A process of its own (`python -m localllm.bench.client.null_server`) that needs nothing but the standard
library. It tells its port on its output and ends when its input ends, so also when its parent is killed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(value: object) -> bytes:
    data = b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode())
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    known = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "null"}
    return _chunk({**known, "choices": [choice]})


def _ending(n_tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": n_tokens, "total_tokens": n_tokens + 1}
    return _event({}, "length") + _chunk({"choices": [], "usage": usage}) + _chunk(b"[DONE]") + b"0\r\n\r\n"


def serve(listener: socket.socket) -> None:
    """Answer the connections of `listener` until the process ends."""
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_converse, args=(connection,), daemon=True).start()


def _converse(connection: socket.socket) -> None:
    """Answer requests one after another until the other side closes, or sends what is no request."""
    with suppress(OSError, ValueError), connection, connection.makefile("rb") as received:
        while (fields := _request(received)) is not None:
            _answer(connection, int(fields["max_tokens"]), float(fields.get("pace_s", 0)))


def _answer(connection: socket.socket, n_tokens: int, pace_s: float) -> None:
    """Send `n_tokens` pieces, a packet each, with `pace_s` between them."""
    token = _event({"content": " a"})
    connection.sendall(_HEAD + token)
    for _ in range(n_tokens - 1):
        if pace_s:
            time.sleep(pace_s)
        connection.sendall(token)
    connection.sendall(_ending(n_tokens))


def _request(received: BinaryIO) -> dict[str, Any] | None:
    """Return the body of the next request; None where there is none. Raises ValueError."""
    n_bytes = 0
    line = received.readline()
    while line.strip():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            n_bytes = int(value)
        line = received.readline()
    if not n_bytes:
        return None
    fields = json.loads(received.read(n_bytes))
    if not isinstance(fields, dict) or "max_tokens" not in fields:
        raise ValueError("no request for tokens")
    return fields


def main() -> None:
    """Listen on a free port of the loopback, tell it on stdout, and serve until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # answers under way have nobody to go to


if __name__ == "__main__":
    main()
