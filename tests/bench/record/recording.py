"""A proxy in front of a stand-in, and raw talk with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.client.calls import Target
from localllm.bench.record.keeper import Keeper
from localllm.bench.record.proxy import Proxy
from localllm.bench.workloads.trace import Recorded, read_trace
from tests.bench.client.stand_in import Script, StandIn, stand_in

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLOSED_PORT = 1  # nothing of this machine listens there


@dataclass
class Recording:
    """A running proxy, the stand-in behind it, the file, and what went wrong in the proxy."""

    proxy: Proxy
    behind: StandIn
    file: Path
    keeper: Keeper
    faults: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.proxy.port

    async def kept(self, n_requests: int) -> tuple[Recorded, ...]:
        """Return what is in the file as soon as it is so much; a trace may be read while it grows."""
        for _ in range(400):
            found = read_trace(self.file).requests
            if len(found) >= n_requests:
                return found
            await asyncio.sleep(0.005)
        return read_trace(self.file).requests

    def request(self, fields: Any, path: str = CHAT, *headers: str) -> bytes:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{self.port}", f"content-length: {len(body)}", *headers]
        return "\r\n".join([*lines, "content-type: application/json", "", ""]).encode() + body

    def get(self, path: str, *headers: str) -> bytes:
        return "\r\n".join([f"GET {path} HTTP/1.1", f"host: 127.0.0.1:{self.port}", *headers, "", ""]).encode()

    async def exchange(self, request: bytes) -> bytes:
        """Return all bytes of the answer to a request on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            with suppress(ConnectionError):
                return await asyncio.wait_for(reader.read(-1), 20)
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def recording(file: Path, script: Script, *, keeps_text: bool = False, port: int = 0) -> AsyncIterator[Recording]:
    async with stand_in(script) as behind:
        keeper = Keeper(file, keeps_text=keeps_text)
        faults: list[str] = []
        proxy = Proxy(Target("127.0.0.1", port or behind.port, "/base"), keeper, faults.append)
        await proxy.start()
        try:
            yield Recording(proxy, behind, file, keeper, faults)
        finally:
            await proxy.close()
            keeper.close()
        assert not faults


def record(file: Path, script: Script, work: Callable[[Recording], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with recording(file, script, **settings) as running:
            return await work(running)

    return asyncio.run(run())


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body, cut out of its chunks."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines[1:]}
    if headers.get("transfer-encoding") == "chunked":
        parts, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(parts)
    return int(lines[0].split()[1]), headers, body
