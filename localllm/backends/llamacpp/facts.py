"""What a context can do, told truthfully: the engine's spec and its fingerprint."""

from __future__ import annotations

import os

from localllm.backends.llamacpp import bindings
from localllm.backends.llamacpp.context import NativeContext
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings
from localllm.runtime.engine import EngineSpec, ExportUnit, PrefixRule

# Copying, then putting a checkpoint back, is 0.04 off there (native.md): never rewound.
NOT_REWINDABLE = frozenset({"deepseek4"})

# Each row of a text to embed gets logits too, in a buffer that stays; more rows are hardly faster.
_MAX_EMBED_ROWS, _EMBED_OUTPUT_BYTES = 64, 32 << 20


def spec_of(model: LlamaModel, settings: ContextSettings, context: NativeContext) -> EngineSpec:
    """Return the engine's spec as the library reports it (what was asked for is not repeated)."""
    rule = prefix_rule(model, settings)
    # A window cache plans all graphs of a batch before it runs the first: what the last one drops is
    # missing in the first where cells are shared. So one graph a forward there.
    loses_cells = model.window_tokens > 0 and not settings.swa_full
    max_rows = min(context.n_batch, context.n_ubatch)
    cuttable = rule is not PrefixRule.CHECKPOINT
    joins = joins_blocks(model, settings)
    max_sequence = min(context.n_ctx_seq, settings.max_sequence_tokens or context.n_ctx_seq)
    if model.info.learned_positions:  # native.md N9: an abort beyond the trained context
        max_sequence = min(max_sequence, model.n_ctx_train)
    # A purely recurrent model keeps one state a slot, however long the sequence.
    pool = context.n_ctx * context.n_slots if model.is_recurrent else context.n_ctx
    return EngineSpec(
        n_vocab=model.n_vocab,
        n_slots=context.n_slots,
        pool_tokens=pool,
        max_batch_tokens=max_rows if loses_cells else context.n_batch,
        max_sequence_tokens=max_sequence,
        max_embed_tokens=max_sequence,
        max_embed_rows=min(max_rows, _MAX_EMBED_ROWS, max(1, _EMBED_OUTPUT_BYTES // (4 * model.n_vocab))),
        max_rollback_tokens=None if cuttable else context.n_rs_seq,
        prefix_rule=rule,
        window_tokens=model.window_tokens if rule is PrefixRule.WINDOW else 0,
        copy_shares_memory=settings.kv_unified,
        export_unit=ExportUnit.BLOCK if (settings.kv_unified and cuttable) or joins else ExportUnit.WHOLE,
        joins_blocks=joins,
        mixes_prefill_and_decode=not settings.cut_tokens,
        kv_types=(settings.kv_k, settings.kv_v),
        pool_is_host_memory=settings.pool_is_host_memory,
        cut_tokens=settings.cut_tokens,
        exact_rows=settings.exact_rows,
        fingerprint=fingerprint(model, settings, context.n_ctx_seq),
    )


def prefix_rule(model: LlamaModel, settings: ContextSettings) -> PrefixRule:
    """Return where the model's sequences may be cut."""
    if model.is_recurrent or model.is_hybrid:
        return PrefixRule.CHECKPOINT
    if model.window_tokens > 0:  # also where the device loses no cell: a state has only those of the window
        return PrefixRule.WINDOW
    return PrefixRule.ANY


def joins_blocks(model: LlamaModel, settings: ContextSettings) -> bool:
    """Say whether states are cut into blocks by us, as native code cannot: not where windows leave cells out."""
    is_any = prefix_rule(model, settings) is PrefixRule.ANY
    return is_any and bool(settings.cut_tokens) and not settings.kv_unified


def rope_factors(model: LlamaModel, n_ctx_seq: int) -> str | None:
    """Return which factors turn K: "long" in a longer context than it first knew; None = it has no choice.

    Source: llama.cpp's `llama_model::get_rope_factors`.
    """
    if not any(tensor.name.startswith("rope_factors_") for tensor in model.info.tensors):
        return None
    known = model.metadata(f"{model.info.architecture}.rope.scaling.original_context_length")
    return "long" if n_ctx_seq > int(known or model.n_ctx_train) else "short"


def fingerprint(model: LlamaModel, settings: ContextSettings, n_ctx_seq: int) -> str:
    """Return everything that decides the bytes of the KV, as one line. `n_ctx_seq`: cells for one sequence."""
    parts: dict[str, object] = {
        "model": model.identity,
        "llama.cpp": f"{bindings.library_version()}-{bindings.library_commit()}-{bindings.kernels_checksum()}",
        "kv": f"{settings.kv_k}:{settings.kv_v}",
        "flash": settings.flash_attn,
        "unified": settings.kv_unified,
        "swa_full": settings.swa_full,
        "rs": settings.n_rs_seq,
        "repack": model.settings.repack,
        "gpu": model.settings.n_gpu_layers,
    }
    if not settings.kv_unified and not joins_blocks(model, settings):
        parts["slots"] = settings.n_slots  # a whole state counts the streams of all of them
    if (factors := rope_factors(model, n_ctx_seq)) is not None:
        parts["rope"] = factors
    if (unrotated := os.environ.get("LLAMA_ATTN_ROT_DISABLE")) is not None:  # the one variable that changes KV
        parts["unrotated"] = unrotated
    if settings.cut_tokens:
        parts |= {"cuts": settings.cut_tokens, "threads": f"{settings.n_threads}:{settings.n_threads_batch}"}
    return " ".join(f"{key}={value}" for key, value in parts.items())
