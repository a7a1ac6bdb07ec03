"""The bare script that `localllm run` is timed against: what one would write over the bindings.

It is text for another interpreter, not part of the package: it imports none of our code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.models.kv_types import number_of

SCRIPT = """
import ctypes, json, os, sys
from llama_cpp import llama_cpp as C

ask = json.loads(sys.argv[1])
C.llama_backend_init()
settings = C.llama_model_default_params()
settings.n_gpu_layers, settings.use_extra_bufts = ask["n_gpu_layers"], ask["repack"]
model = C.llama_model_load_from_file(ask["path"].encode(), settings)
settings = C.llama_context_default_params()
settings.n_ctx = ask["n_ctx"]
settings.n_threads = settings.n_threads_batch = ask["n_threads"]
settings.n_batch, settings.n_ubatch = ask["n_batch"], ask["n_ubatch"]
settings.type_k, settings.type_v = ask["type_k"], ask["type_v"]
settings.flash_attn_type = ask["flash_attn"]
context = C.llama_init_from_model(model, settings)
tokens = (C.llama_token * len(ask["tokens"]))(*ask["tokens"])
if C.llama_decode(context, C.llama_batch_get_one(tokens, len(tokens))):
    sys.exit("decode failed")
vocabulary = C.llama_model_get_vocab(model)
logits = C.llama_get_logits_ith(context, -1)
import numpy
best = int(numpy.ctypeslib.as_array(logits, shape=(C.llama_vocab_n_tokens(vocabulary),)).argmax())
piece = ctypes.create_string_buffer(256)
length = C.llama_token_to_piece(vocabulary, best, piece, len(piece), 0, True)
os.write(1, piece.raw[:length] or b" ")
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class BareStart:
    """What the bare script is to load and prefill: the same as the command beside it.

    `flash_attn`: 1 = on, 0 = off, -1 = left to the library.
    """

    path: Path
    tokens: tuple[int, ...]
    n_ctx: int
    n_threads: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int = 0
    repack: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: int = -1

    def command(self) -> Sequence[str]:
        """Return the command line that runs the script; it waits for the end of stdin before it leaves."""
        ask = {
            "path": str(self.path),
            "tokens": list(self.tokens),
            "n_ctx": self.n_ctx,
            "n_threads": self.n_threads,
            "n_batch": self.n_batch,
            "n_ubatch": self.n_ubatch,
            "n_gpu_layers": self.n_gpu_layers,
            "repack": self.repack,
            "type_k": number_of(self.type_k),
            "type_v": number_of(self.type_v),
            "flash_attn": self.flash_attn,
        }
        return [sys.executable, "-c", SCRIPT, json.dumps(ask)]
