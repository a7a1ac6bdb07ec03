"""`localllm show`: what a model is and what it needs, from its header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localllm.cli.options import Ctx, Json, Kv, Memory, Model, TalkFlags
from localllm.cli.output import Answer, Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.models.info import ModelInfo
    from localllm.models.kv_types import KvTypes
    from localllm.models.resolve import ModelFile
    from localllm.models.store import Store

HASH_AT_ONCE_BYTES = 2_000_000_000
"""A file up to this size is hashed when it is shown (some seconds, once); a larger one is not waited for."""


def show(
    model: Model,
    talk: TalkFlags,
    memory: Memory = False,
    ctx: Ctx = "auto",
    kv: Kv = "auto",
    json: Json = False,
) -> None:
    """Tell what a model is and needs.

    Shape, quantisation, context, template, licence, hash, KV size, sampling, provenance.

    --memory adds the terms of the memory estimate for --ctx (auto: the context it was trained for) and --kv.
    """
    from localllm.cli.wishes import kv_types
    from localllm.models import info, resolve
    from localllm.models.store import Store

    types, n_ctx = kv_types(kv), _n_ctx(ctx)
    store = Store()
    found = resolve.resolve(model, store)
    facts = info.read_info(found.path)
    if facts.layers:
        types.check(
            head_sizes_k=facts.head_sizes_k,
            head_sizes_v=facts.head_sizes_v,
            flash_attn=True,
            reads_v_from_k=facts.reads_v_from_k,
        )
    notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
    document = _document(found, facts, types, store, notes)
    if memory:
        document |= _memory(facts, n_ctx, types)
    if json:
        Answer().document(document)
    else:
        from localllm.cli.show_text import text

        Answer().write(text(document))


def _n_ctx(text: str) -> int | None:
    from localllm.cli.units import number_or_auto

    return number_or_auto("--ctx", text)


def _document(found: ModelFile, facts: ModelInfo, types: KvTypes, store: Store, notes: Notes) -> dict[str, Any]:
    from localllm.models.memory import ContextShape, kv_bytes_per_token, state_bytes
    from localllm.runtime.sampling_params import model_defaults

    stored = store.get(found.name) if found.source == "store" else None
    return {
        "name": found.name,
        "path": str(found.path),
        "files": [str(path) for path in found.files],
        "in": found.source,
        "sha256": found.sha256 or _hash(found, facts, store, notes),
        "kind": facts.kind.value,
        "cannot_answer": _why_not(facts),
        "architecture": facts.architecture,
        "title": facts.name,
        "n_params": facts.n_params,
        "quant": facts.quant or None,
        "size_bytes": facts.size_bytes,
        "n_ctx_train": facts.n_ctx_train,
        "n_layers": facts.n_layers,
        "n_embd": facts.n_embd,
        "n_head": facts.n_head,
        "n_head_kv": sorted({heads for heads in facts.n_head_kv if heads}),
        "n_vocab": facts.n_vocab,
        "n_expert": facts.n_expert,
        "n_expert_used": facts.n_expert_used,
        "window_tokens": facts.window_tokens,
        "is_recurrent": facts.is_recurrent,
        "chat_template": facts.chat_template,
        "chat_templates": sorted(facts.chat_templates),
        "license": (stored.license if stored else None) or facts.license,
        "source": stored.source if stored else facts.source_url,
        "revision": stored.revision if stored else None,
        "quantiser": (stored.quantiser if stored else None) or facts.quantiser,
        "imatrix": (stored.imatrix if stored else None) or facts.imatrix,
        "pulled_at": stored.pulled_at if stored else None,
        "kv_type": str(types),
        "kv_bytes_per_token": kv_bytes_per_token(facts, types),
        "state_bytes_per_sequence": state_bytes(facts, ContextShape(n_slots=1)),
        "sampling": _changed(model_defaults(facts.sampling_defaults)),
        "sampling_from": "the file" if facts.sampling_defaults else "localllm",
    }


def _changed(sampling: object) -> dict[str, Any]:
    """Return the settings that differ from the neutral ones: those that do something."""
    from dataclasses import asdict

    from localllm.runtime.sampling_params import Sampling

    neutral = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != neutral[name]}  # type: ignore[call-overload]


def _why_not(facts: ModelInfo) -> str | None:
    """Return why this file cannot answer a prompt; None where it can."""
    from localllm.models.info import require_generation

    try:
        require_generation(facts)
    except LocalLLMError as error:
        return error.message
    return None


def _hash(found: ModelFile, facts: ModelInfo, store: Store, notes: Notes) -> str | None:
    """Return the hash of one file: the remembered one, else computed where that takes seconds at most."""
    from localllm.models import hashes

    if len(found.files) != 1 or facts.size_bytes > HASH_AT_ONCE_BYTES:
        return None
    notes.progress(f"hashing {found.path.name}")
    try:
        return hashes.sha256_of(found.path, store)
    finally:
        notes.clear()


def _memory(facts: ModelInfo, n_ctx: int | None, types: KvTypes) -> dict[str, Any]:
    from dataclasses import asdict

    from localllm import compose
    from localllm.models import available, memory
    from localllm.runtime.config import LoadConfig

    if not facts.has_weights:
        return {"fits": False, "largest_ctx": 0, "memory": None}
    shape = compose.memory_shape(LoadConfig(kv=types))
    estimate = memory.estimate(facts, n_ctx or facts.n_ctx_train, shape)
    free = available.available_bytes()
    budget = int(free * memory.USABLE_SHARE)
    return {
        "fits": estimate.total_bytes <= budget and estimate.n_ctx <= facts.n_ctx_train,
        "largest_ctx": memory.largest_ctx(facts, budget, shape),
        "memory": {
            **asdict(estimate),
            "total_bytes": estimate.total_bytes,
            "available_bytes": free,
            "usable_share": memory.USABLE_SHARE,
        },
    }
