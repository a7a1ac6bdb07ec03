"""Starts the servers that ours is compared with, on the same model and settings, where they were built.

`DIR` is what `peers.sh DIR` made: `build/bin/llama-server`, and `src/examples/server/server.py` of
llama-cpp-python's source distribution. The latter needs fastapi and websockets, which ours does
not: `pip install --target DIR/site fastapi websockets`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.client.calls import Target
from localllm.bench.serving.servers.started import StartedServer
from localllm.bench.serving.servers.starting import Starting

START_TIMEOUT_S = 120.0
KV_TYPE_NUMBERS = {"f16": 1, "q4_0": 2, "q8_0": 8}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every server is started with.

    `settings`: those that ours was loaded with, by llama-bench's names. `environment`: the caller's,
    as it was before our own library was loaded (which sets what its threads do at a barrier).
    """

    model: Path
    n_parallel: int
    settings: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with: how it is started, or why it cannot be."""

    name: str
    command: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


def llama_server(folder: Path | None, wanted: Wanted, port: int) -> Peer:
    """Return llama.cpp's own server."""
    name = "llama-server"
    if folder is None:
        return Peer(name, left_out="not given (--peers DIR)")
    binary = folder / "build" / "bin" / "llama-server"
    if not binary.is_file():
        return Peer(name, left_out="not built there (peers.sh DIR)")
    s = wanted.settings
    flash = {1: "on", 0: "off"}.get(s["flash_attn"], s["flash_attn"] if isinstance(s["flash_attn"], str) else "auto")
    flags: dict[str, Any] = {
        "--model": wanted.model,
        "--host": "127.0.0.1",
        "--port": port,
        "--parallel": wanted.n_parallel,
        "--ctx-size": s["n_ctx"],
        "--threads": s["n_threads"],
        "--threads-batch": s["n_threads"],
        "--batch-size": s["n_batch"],
        "--ubatch-size": s["n_ubatch"],
        "--flash-attn": flash,
        "--cache-type-k": s["type_k"],
        "--cache-type-v": s["type_v"],
        "--n-gpu-layers": s["n_gpu_layers"],
    }
    switches = ["--kv-unified" if s["kv_unified"] else "--no-kv-unified", "--no-webui"]
    switches += [] if s["use_mmap"] else ["--no-mmap"]
    switches += [] if s["repack"] else ["--no-repack"]
    return Peer(name, (str(binary), *(str(x) for pair in flags.items() for x in pair), *switches))


def python_server(folder: Path | None, wanted: Wanted, port: int, config: Path) -> Peer:
    """Return llama-cpp-python's example server; its settings go into the file `config`."""
    name = "llama-cpp-python's server"
    if folder is None:
        return Peer(name, left_out="not given (--peers DIR)")
    script = folder / "src" / "examples" / "server" / "server.py"
    if not script.is_file():
        return Peer(name, left_out="not there (peers.sh DIR)")
    path = str(folder / "site")
    probe = subprocess.run(
        [sys.executable, "-c", "import fastapi, websockets"],
        env={**wanted.environment, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        timeout=60,
    )
    if probe.returncode:
        return Peer(name, left_out=f"fastapi is missing (pip install --target {folder.name}/site fastapi websockets)")
    s = wanted.settings
    model = {
        "path": str(wanted.model),
        "n_ctx": s["n_ctx"],
        "n_batch": s["n_batch"],
        "n_ubatch": s["n_ubatch"],
        "n_seq_max": wanted.n_parallel,
        "threads": s["n_threads"],
        "threads_batch": s["n_threads"],
        "n_gpu_layers": s["n_gpu_layers"],
        "use_mmap": s["use_mmap"],
        "kv_unified": s["kv_unified"],
        "type_k": KV_TYPE_NUMBERS[s["type_k"]],
        "type_v": KV_TYPE_NUMBERS[s["type_v"]],
        **({} if s["flash_attn"] in (-1, "auto") else {"flash_attn": s["flash_attn"] in (1, "on")}),
    }
    config.write_text(json.dumps({"server": {"host": "127.0.0.1", "port": port}, "model": model}), encoding="utf-8")
    # A library that it loads and never calls for text; our build of the package leaves it out.
    variables = {"PYTHONPATH": path, "MTMD_CPP_LIB": str(folder / "build" / "bin")}
    return Peer(name, (sys.executable, str(script), "-C", str(config)), variables)


@contextlib.contextmanager
def running(peer: Peer, wanted: Wanted, port: int) -> Iterator[Target]:
    """Start a peer, wait until it answers, and end it. Raises LocalLLMError with what it said where it does not."""
    starting = Starting(
        peer.name,
        peer.command,
        variables=peer.variables,
        environment=wanted.environment,
        port=port,
        ready_timeout_s=START_TIMEOUT_S,
    )
    with StartedServer(starting) as server:
        yield Target.of_url(server.url)
