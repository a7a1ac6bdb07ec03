from __future__ import annotations

import json
import os
from pathlib import Path

from proof.peers import Wanted, llama_server, python_server

SETTINGS = {
    "n_ctx": 8192,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "n_gpu_layers": 0,
    "flash_attn": "auto",
    "type_k": "f16",
    "type_v": "q8_0",
    "kv_unified": True,
    "use_mmap": True,
    "repack": False,
}
WANTED = Wanted(Path("m.gguf"), 8, SETTINGS, dict(os.environ))


def built(tmp_path: Path) -> Path:
    for name in ("build/bin/llama-server", "src/examples/server/server.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("fastapi", "websockets"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
    return tmp_path


def test_llama_server_gets_our_settings(tmp_path: Path) -> None:
    command = " ".join(llama_server(built(tmp_path), WANTED, 1234).command)
    for flags in ("--parallel 8", "--ctx-size 8192", "--threads 2", "--threads-batch 2", "--cache-type-v q8_0"):
        assert flags in command
    assert "--flash-attn auto" in command
    assert "--no-repack" in command
    assert "--no-mmap" not in command


def test_the_python_server_gets_our_settings(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    peer = python_server(built(tmp_path), WANTED, 1234, config)
    assert peer.left_out == ""
    found = json.loads(config.read_text())
    assert found["server"] == {"host": "127.0.0.1", "port": 1234}
    assert found["model"]["n_seq_max"] == 8
    assert (found["model"]["type_k"], found["model"]["type_v"]) == (1, 8)
    assert "flash_attn" not in found["model"]


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    assert "not given" in llama_server(None, WANTED, 1).left_out
    assert "not built" in llama_server(tmp_path, WANTED, 1).left_out
    assert "not there" in python_server(tmp_path, WANTED, 1, tmp_path / "c").left_out
    (built(tmp_path) / "site" / "fastapi" / "__init__.py").write_text("raise ImportError")
    assert "pip install --target" in python_server(tmp_path, WANTED, 1, tmp_path / "c").left_out
