"""The steps of `localllm selfcheck`, a layer each: from the files on disk to the last trace of the server."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm.cli.asking import Failed, Told, ask, first_model, tell
from localllm.cli.http_client import Address, HttpClient, is_loopback
from localllm.cli.own_server import OwnServer, failure_of, serve_command
from localllm.cli.ports import is_free, sockets_of
from localllm.cli.pressure import PressureWatch, is_there, tree
from localllm.cli.tables import short_hash, size
from localllm.errors import LocalLLMError, ServerUnreachable, TimedOut

PROMPT = ", ".join(str(number) for number in range(1, 41)) + ","
"""Counting: every model goes on with certainty, so that no small difference between two runs can tip a token."""

ANSWER_TOKENS = 24
READY_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 2.0
_POLL_S = 0.1


@dataclass(slots=True)
class Step:
    """What became of one layer. `told`: a line for people; `facts`: the same for programs."""

    layer: str
    ok: bool
    told: str
    took_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    error: LocalLLMError | None = None


class SelfCheck:
    """Runs the steps in order. After the first that fails, only what ends the server is still done."""

    def __init__(self, model: str, command: Callable[[Path], Sequence[str]] = serve_command) -> None:
        self._model = model
        self._command = command
        self._path = Path()
        self._server: OwnServer | None = None
        self._watch: PressureWatch | None = None
        self._client: HttpClient | None = None
        self._answer: Told | None = None

    def run(self) -> Iterator[Step]:
        """Yield each step as it ends. Leaves no process and no file, also when it is not read to its end."""
        try:
            for layer, work in self._steps():
                step = self._done(layer, work)
                yield step
                if not step.ok:
                    break
            yield from self._endings()
        finally:
            if self._server is not None:
                self._server.kill()
                self._server.remove()
            if self._watch is not None:
                self._watch.stop()

    def _steps(self) -> Iterator[tuple[str, Callable[[], tuple[str, dict[str, Any]]]]]:
        yield "installation", _installation
        yield "model", self._find
        yield "start", self._start
        yield "network", self._network
        yield "answer", self._first
        yield "without cache", self._second

    def _endings(self) -> Iterator[Step]:
        if self._server is None:
            return
        yield self._done("stop", self._stop)
        yield self._done("memory", self._memory)
        yield self._done("left over", self._left_over)

    def _done(self, layer: str, work: Callable[[], tuple[str, dict[str, Any]]]) -> Step:
        """Do the work of a step. Where the server ended in it, its own last words are what is told."""
        started_s = time.monotonic()
        try:
            told, facts = work()
        except Failed as wrong:
            return Step(layer, False, str(wrong), time.monotonic() - started_s, wrong.facts)
        except Exception as error:
            failure = failure_of(error)
            if isinstance(error, ServerUnreachable) and self._server is not None:
                failure = self._server.last_words() or failure
            return Step(layer, False, failure.message, time.monotonic() - started_s, error=failure)
        return Step(layer, True, told, time.monotonic() - started_s, facts)

    def _find(self) -> tuple[str, dict[str, Any]]:
        """Record which file it is."""
        from localllm.models.hashes import sha256_of
        from localllm.models.info import read_info
        from localllm.models.resolve import resolve

        found = resolve(self._model)
        info = read_info(found.path)
        hashes = [sha256_of(file) for file in found.files]
        self._path = found.path
        facts = {
            "name": found.name,
            "path": str(found.path),
            "sha256": hashes,
            "size_bytes": info.size_bytes,
            "architecture": info.architecture,
            "quant": info.quant,
        }
        return f"{found.name}, {info.quant}, {size(info.size_bytes)}, sha256 {short_hash(hashes[0])}", facts

    def _start(self) -> tuple[str, dict[str, Any]]:
        """Start the server and wait until its model is loaded."""
        started_s = time.monotonic()
        server = self._server = OwnServer(self._command(self._path))
        self._watch = PressureWatch(server.process.pid)
        url = server.wait_listening()
        listening_s = time.monotonic() - started_s
        self._client = HttpClient(Address.parse(url), timeout_s=ANSWER_TIMEOUT_S)
        while (reply := self._client.ask("GET", "/readyz")).status != 200:
            server.check_running()
            why = reply.json.get("status") if isinstance(reply.json, dict) else None
            if why not in ("loading", "restarting"):
                raise Failed(f"it does not get ready: {reply.problem}")
            if time.monotonic() - started_s > READY_TIMEOUT_S:
                raise TimedOut(f"The model was not ready: {reply.problem}", "localllm serve")
            time.sleep(_POLL_S)
        ready_s = time.monotonic() - started_s
        facts = {"url": url, "pid": server.process.pid, "listening_s": listening_s, "ready_s": ready_s}
        return f"{url}, listening after {listening_s:.2f} s, model ready after {ready_s:.2f} s", facts

    def _network(self) -> tuple[str, dict[str, Any]]:
        """Prove from the sockets of its processes that it listens on loopback only, and on nothing else."""
        server, client = self._at_work()
        found = [one for process in tree(server.process.pid) for one in sockets_of(process)]
        listening = sorted({f"{host}:{port}" for host, port, kind in found if kind == "listens"})
        outside = sorted({f"{host}:{port}" for host, port, _ in found if not is_loopback(host)})
        facts = {"listening": listening, "beyond_loopback": outside, "private_socket": str(server.socket)}
        if outside:
            raise Failed(f"it is open beyond loopback: {', '.join(outside)}", facts)
        if {one.rpartition(":")[2] for one in listening} != {str(client.address.port)}:
            raise Failed(f"it listens on {', '.join(listening) or 'nothing'}, not on {client.address.netloc}", facts)
        mode = server.socket.stat().st_mode & 0o777
        if mode != 0o600:
            raise Failed(f"others may use its private socket: mode {mode:o}", facts)
        return f"loopback only: {', '.join(listening)}; private socket 0600", facts

    def _first(self) -> tuple[str, dict[str, Any]]:
        """Ask the fixed prompt."""
        self._answer = answer = self._ask(with_cache=True)
        return tell(answer)

    def _second(self) -> tuple[str, dict[str, Any]]:
        """Ask it again, with the cache off: the same text, every token computed."""
        first, second = self._answer, self._ask(with_cache=False)
        assert first is not None
        told, facts = tell(second)
        if second.n_cached:
            raise Failed(f"{second.n_cached} tokens came from the cache that was turned off", facts)
        if second.text != first.text or second.finish_reason != first.finish_reason:
            raise Failed(f"another answer: {second.text!r} after {first.text!r}", facts)
        return f"the same text; {told}", facts

    def _stop(self) -> tuple[str, dict[str, Any]]:
        """Ask it to stop over its private socket and wait for its end."""
        from localllm.worker import client
        from localllm.worker.registry import ServerRecord

        server = self._server
        assert server is not None
        server.check_running()
        if self._watch is not None:
            self._watch.sample()
        record = ServerRecord(server.process.pid, 0.0, server.url, server.socket, "", server.socket)
        started_s = time.monotonic()
        client.call(record, "stop", timeout_s=STOP_TIMEOUT_S)
        code = server.wait_ended(STOP_TIMEOUT_S)
        took_s = time.monotonic() - started_s
        if code != 0:
            raise Failed(f"it ended with code {code}, not 0")
        return f"ended in {took_s:.2f} s with code 0", {"exit_code": code, "took_s": took_s}

    def _memory(self) -> tuple[str, dict[str, Any]]:
        """Tell what memory went through from the start to here."""
        assert self._watch is not None
        seen = self._watch.stop()
        facts = {
            "peak_bytes": seen.peak_bytes,
            "swapped_bytes": seen.swapped_bytes,
            "stalled_s": seen.stalled_s,
            "watched_s": seen.took_s,
        }
        if seen.problem:
            raise Failed(seen.problem, facts)
        swapped = "swapping is not told here" if seen.swapped_bytes is None else f"{size(seen.swapped_bytes)} swapped"
        stalled = "stalls are not told here" if seen.stalled_s is None else f"{seen.stalled_s:.2f} s stalled"
        return f"{size(seen.peak_bytes)} at most, {swapped}, {stalled}", facts

    def _left_over(self) -> tuple[str, dict[str, Any]]:
        """Prove that no process, port or file is left."""
        server, watch = self._server, self._watch
        assert server is not None
        assert watch is not None
        server.kill()
        give_up_s = time.monotonic() + GONE_TIMEOUT_S
        while (alive := [pid for pid, started_s in watch.pids if is_there(pid, started_s)]) and (
            time.monotonic() < give_up_s
        ):
            time.sleep(0.02)
        files = server.left_files()
        port_free = self._client is None or is_free(self._client.address)
        facts = {"processes": alive, "port_free": port_free, "files": files, "n_processes_seen": len(watch.pids)}
        if alive:
            raise Failed(f"processes are left: {', '.join(map(str, alive))}", facts)
        if not port_free:
            raise Failed("its port is still taken", facts)
        if files:
            raise Failed(f"files are left: {', '.join(files)}", facts)
        return f"none of {len(watch.pids)} processes, no port, no file", facts

    def _ask(self, *, with_cache: bool) -> Told:
        _, client = self._at_work()
        body = {
            "model": first_model(client),
            "prompt": PROMPT,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_prompt": with_cache,
        }
        return ask(client, "/v1/completions", body)

    def _at_work(self) -> tuple[OwnServer, HttpClient]:
        assert self._server is not None
        assert self._client is not None
        self._server.check_running()
        return self._server, self._client


def _installation() -> tuple[str, dict[str, Any]]:
    """Record the versions."""
    from localllm import __version__
    from localllm.backends import registry

    native = registry.native_report()
    if native.failure:
        raise Failed(f"the native library does not load: {native.failure}")
    facts = {
        "localllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "llama-cpp-python": metadata.version("llama-cpp-python"),
        "llama.cpp": native.version,
    }
    binding = facts["llama-cpp-python"]
    told = f"localllm {__version__}, Python {facts['python']}, llama-cpp-python {binding}, llama.cpp {native.version}"
    return told, facts
