"""A server in a process of its own that does exactly what each request asks for, and logs when it did it.

Its log is the truth that the client's figures are held against: time.perf_counter() is one clock for
all processes of a machine (CLOCK_MONOTONIC on Linux, mach time on macOS).
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

if __name__ != "__main__":
    from localllm.bench.client.calls import Call, Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Script:
    """What one request asks for: the wait before each piece, how many of the first are thoughts, and the end.

    `tokens_per_piece` counts in `usage` alone. `end`: "stop", "refuse", "error_event", "disconnect",
    "malformed", "stall" (nothing more, for ever), "cut" (no [DONE]). `alone`: only one such at a time. `n_more`: so
    many pieces more in one packet at the end.
    """

    waits_s: Sequence[float]
    n_thoughts: int = 0
    tokens_per_piece: int = 1
    end: str = "stop"
    alone: bool = False
    n_more: int = 0

    def call(self, number: int) -> Call:
        return Call.of("/v1/chat/completions", {"number": number, "script": self.__dict__}, label=str(number))


@dataclass
class Done:
    """What the server did for one request, and when."""

    number: int
    received_s: float
    piece_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0


@dataclass(frozen=True)
class Scripted:
    """A running scripted server."""

    port: int
    pid: int

    def target(self, **settings: Any) -> Target:
        return Target("127.0.0.1", self.port, **settings)

    def log(self) -> dict[int, Done]:
        """Return what was done since the last time, by the number of the request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/log")
            return {record["number"]: Done(**record) for record in json.loads(connection.getresponse().read())}
        finally:
            connection.close()


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    """Run the server; it is gone in the end, also where this process is killed."""
    command = [sys.executable, str(Path(__file__))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as process:
        try:
            assert process.stdout is not None
            yield Scripted(int(process.stdout.readline()), process.pid)
        finally:
            process.kill()


class Connection(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self, log: list[Done], lock: asyncio.Lock) -> None:
        self.log = log
        self.lock = lock
        self.received = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if not found or len(body) < sum(lengths):
            return
        self.received = b""
        if head.startswith(b"GET"):
            self.tell_log()
        else:
            # What arrived together is noted together, before any of it is decoded.
            asyncio.get_running_loop().call_soon(self.begin, body, now_s)

    def begin(self, body: bytes, received_s: float) -> None:
        fields = json.loads(body)
        done = Done(fields["number"], received_s)
        self.log.append(done)
        self.task = asyncio.get_running_loop().create_task(self.serve(fields["script"], done))

    def tell_log(self) -> None:
        body = json.dumps([done.__dict__ for done in self.log]).encode()
        self.log.clear()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async def serve(self, script: Mapping[str, Any], done: Done) -> None:
        if script["alone"]:
            async with self.lock:
                await self.answer(script, done)
        else:
            await self.answer(script, done)

    async def answer(self, script: Mapping[str, Any], done: Done) -> None:
        if script["end"] == "refuse":
            body = b'{"error":{"message":"no","type":"x","code":"queue_full"}}'
            self.write(done, b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return
        for number, wait_s in enumerate(script["waits_s"]):
            await asyncio.sleep(wait_s)
            name = "reasoning_content" if number < script["n_thoughts"] else "content"
            data = chunk({"choices": [{"index": 0, "delta": {name: "a"}, "finish_reason": None}]})
            done.piece_s.append(self.write(done, data if number else HEAD + data))
        await self.finish(script, done)

    async def finish(self, script: Mapping[str, Any], done: Done) -> None:
        end, n_tokens = script["end"], len(script["waits_s"]) * script["tokens_per_piece"]
        last = b"0\r\n\r\n"
        if end == "disconnect":
            self.transport.abort()
        elif end == "stall":
            await asyncio.sleep(60)
        elif end == "error_event":
            self.write(done, chunk({"error": {"message": "it died", "code": "worker_died"}}) + last)
        elif end == "malformed":
            self.write(done, chunk(b"{this is no json") + chunk(b"[DONE]") + last)
        elif end == "cut":
            self.write(done, last)
        else:
            finish = chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            usage = chunk({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": n_tokens}})
            more = framed(event({"choices": [{"index": 0, "delta": {"content": "a"}}]}) * script["n_more"])
            self.write(done, more + finish + usage + chunk(b"[DONE]") + last)

    def write(self, done: Done, data: bytes) -> float:
        """Send at once; return and log when."""
        done.ended_s = time.perf_counter()
        self.transport.write(data)
        return done.ended_s


def event(value: Any) -> bytes:
    return b"data: %s\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


def framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""


def chunk(value: Any) -> bytes:
    return framed(event(value))


async def serve() -> None:
    log: list[Done] = []
    lock = asyncio.Lock()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(log, lock), "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def die_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    gc.disable()  # its pauses would be in the log, and so in the truth, but a stalled server tests little
    threading.Thread(target=die_with_parent, daemon=True).start()
    asyncio.run(serve())
