"""Prints, as JSON, what llama.cpp allocates for a model and a context. Run as a process of its own.

Arguments: model, n_ctx, n_slots, n_ubatch, KV type of K, of V, unified, snapshots, repack.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict

import llama_cpp.llama_cpp as native

KV_NUMBERS = {"f16": 1, "q4_0": 2, "q8_0": 8}
_BUFFER = re.compile(r"(\w+): +(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")


def main(path: str, *options: str) -> None:
    n_ctx, n_slots, n_ubatch, kv_k, kv_v, unified, n_rs_seq, repack = options
    lines: list[str] = []
    log = native.llama_log_callback(lambda _level, text, _data: lines.append(text.decode("utf-8", "replace")))
    native.llama_log_set(log, None)
    native.llama_backend_init()
    model_params = native.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = bool(int(repack))
    model = native.llama_model_load_from_file(path.encode(), model_params)
    params = native.llama_context_default_params()
    params.n_ctx, params.n_seq_max = int(n_ctx), int(n_slots)
    params.n_batch = params.n_ubatch = int(n_ubatch)
    params.type_k, params.type_v = KV_NUMBERS[kv_k], KV_NUMBERS[kv_v]
    params.kv_unified, params.n_rs_seq, params.swa_full = bool(int(unified)), int(n_rs_seq), False
    params.flash_attn_type = 1
    context = native.llama_init_from_model(model, params)
    sizes: dict[str, float] = defaultdict(float)
    for _source, device, kind, size in _BUFFER.findall("".join(lines)):
        sizes["mapped" if device.endswith("Mapped") else "copied" if kind == "model" else kind] += float(size)
    sizes["n_params"] = native.llama_model_n_params(model)
    sizes["loaded"] = bool(context)
    sizes["amx_build"] = b"AMX_INT8 = 1" in native.llama_print_system_info()
    json.dump(sizes, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
