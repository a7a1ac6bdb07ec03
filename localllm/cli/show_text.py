"""The facts of `localllm show` as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.cli.tables import NOT_HASHED, count, pairs, size

_TERMS = (
    ("weights", "weights_bytes"),
    ("repacked copy of the weights", "repacked_bytes"),
    ("KV cache", "kv_bytes"),
    ("recurrent state", "state_bytes"),
    ("compute buffers", "compute_bytes"),
    ("output rows", "output_bytes"),
    ("vocabulary", "vocabulary_bytes"),
    ("process", "process_bytes"),
)


def text(facts: Mapping[str, Any]) -> str:
    """Return the lines of a document that `show` made."""
    lines = pairs({name: value for name, value in _rows(facts).items() if value})
    return lines + (_memory(facts) if "memory" in facts else "")


def _rows(facts: Mapping[str, Any]) -> dict[str, str]:
    window = f", window of {facts['window_tokens']:,}" if facts["window_tokens"] else ""
    experts = f", {facts['n_expert_used']} of {facts['n_expert']} experts a token" if facts["n_expert"] else ""
    return {
        "name": facts["name"],
        "title": facts["title"],
        "file": facts["path"] + (f" and {len(facts['files']) - 1} more parts" if len(facts["files"]) > 1 else ""),
        "sha256": facts["sha256"] or NOT_HASHED,
        "note": facts["cannot_answer"] or "",
        "architecture": f"{facts['architecture']}, {facts['n_layers']} layers, width {facts['n_embd']}{experts}",
        "parameters": count(facts["n_params"]) if facts["n_params"] else "",
        "quantisation": f"{facts['quant'] or 'none'}, {size(facts['size_bytes'])}",
        "context": f"{facts['n_ctx_train']:,} tokens trained{window}",
        "vocabulary": f"{facts['n_vocab']:,} tokens",
        "KV cache": _kv(facts),
        "template": _template(facts),
        "sampling": _sampling(facts),
        "licence": facts["license"] or "the file does not say",
        "source": facts["source"] or "",
        "revision": facts["revision"] or "",
        "quantised by": _quantised(facts),
        "pulled": facts["pulled_at"] or "",
    }


def _kv(facts: Mapping[str, Any]) -> str:
    per_token, state = facts["kv_bytes_per_token"], facts["state_bytes_per_sequence"]
    parts = [f"{per_token:,} bytes a token as {facts['kv_type']}"] if per_token else []
    if state:
        parts.append(f"{size(state)} of recurrent state a conversation")
    return ", ".join(parts)


def _template(facts: Mapping[str, Any]) -> str:
    template = facts["chat_template"]
    if not template:
        return "none: chat needs --template FILE, or use --raw"
    first = next((line.strip() for line in template.splitlines() if line.strip()), "")
    named = f", others: {', '.join(facts['chat_templates'])}" if facts["chat_templates"] else ""
    shown = first if len(first) <= 60 else first[:57] + "..."
    return f"yes, {len(template):,} characters{named}: {shown}"


def _sampling(facts: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in facts["sampling"].items())
    return f"{settings or 'the plain distribution'} (from {facts['sampling_from']})"


def _quantised(facts: Mapping[str, Any]) -> str:
    with_imatrix = f"importance matrix {facts['imatrix']}" if facts["imatrix"] else ""
    return ", ".join(part for part in (facts["quantiser"], with_imatrix) if part)


def _memory(facts: Mapping[str, Any]) -> str:
    memory = facts["memory"]
    if memory is None:
        return "\nmemory cannot be estimated: there are no weights in this file\n"
    terms = {name: size(memory[key]) for name, key in _TERMS if memory[key]}
    usable = round(memory["available_bytes"] * memory["usable_share"])
    too_long = memory["n_ctx"] > facts["n_ctx_train"]
    refusal = "longer than the model was trained for" if too_long else "does not fit"
    verdict = "fits" if facts["fits"] else refusal
    largest = f"{facts['largest_ctx']:,} tokens" if facts["largest_ctx"] else "none: the weights alone are too large"
    totals = {
        "in all": f"{size(memory['total_bytes'])}: {verdict}",
        "available": f"{size(memory['available_bytes'])}, of which {size(usable)} may be used",
        "largest context": largest,
    }
    return f"\nmemory with a context of {memory['n_ctx']:,} tokens, KV {facts['kv_type']}\n" + pairs(terms | totals)
