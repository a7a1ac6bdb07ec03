"""How a loaded model, and the settings to load one with, are told to another process: plain values, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.errors import UsageError
from localllm.models.kv_types import ALL_TYPES, KvTypes
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig

if TYPE_CHECKING:
    from localllm.runtime.service import Service
    from localllm.worker.lifecycle import ModelEntry

T = TypeVar("T")

_IGNORED_SETTINGS = frozenset(("parallel", "retained"))  # they change nothing in an answer


def describe_loaded(service: Service, config: LoadConfig) -> dict[str, Any]:
    """Return what other processes may know of a loaded model; `config` is what it was loaded with."""
    model, info, spec = service.model, service.model.info, service.spec
    return {
        "name": model.name,
        "path": str(model.path),
        "sha256": model.sha256,
        "architecture": info.architecture,
        "quant": info.quant,
        "n_ctx": model.n_ctx,
        "n_slots": model.n_slots,
        "max_sequence_tokens": min(spec.max_sequence_tokens, spec.pool_tokens),
        "n_ctx_train": info.n_ctx_train,
        "n_vocab": spec.n_vocab,
        "n_embd": info.n_embd,
        "n_params": info.n_params,
        "size_bytes": info.size_bytes,
        "can_chat": service.can_chat,
        "takes_tools": service.takes_tools,
        "can_fill_in": service.tokenizer.vocabulary.fim_ids is not None,
        "max_embed_tokens": spec.max_embed_tokens,
        "sampling": asdict(model.sampling),
        "settings": dict(model.settings),
        "is_deterministic": model.is_deterministic,
        "notes": list(model.notes),
        "config": config_to_wire(config),
    }


def entry_to_wire(entry: ModelEntry) -> dict[str, Any]:
    """Return what `ps` tells of a model, as builtins."""
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "state": entry.state.value,
        "reason": entry.reason,
        "is_pinned": entry.is_pinned,
        "is_changed": entry.is_changed,
        "n_requests": entry.n_requests,
        "last_used_s": entry.last_used_s,
        "pid": entry.pid,
        "n_ctx": entry.model.get("n_ctx"),
        "quant": entry.model.get("quant"),
    }


def config_to_wire(config: LoadConfig) -> dict[str, Any]:
    """Return load settings as builtins: equal settings give equal values."""
    values = _values(config)
    values["kv"] = f"{config.kv.k}:{config.kv.v}"
    values["template"] = None if config.template is None else str(config.template)
    return values


def differences(held: Mapping[str, Any], wished: Mapping[str, Any]) -> list[str]:
    """Name the load settings that differ and change an answer: "ctx 512, not auto"."""
    names = sorted((held.keys() | wished.keys()) - _IGNORED_SETTINGS)
    return [
        f"{name} {_spelled(held.get(name))}, not {_spelled(wished.get(name))}"
        for name in names
        if held.get(name) != wished.get(name)
    ]


def config_from_wire(wire: Mapping[str, Any]) -> LoadConfig:
    """Return the load settings. Raises UsageError for what are none."""
    values = dict(wire)
    if isinstance(values.get("kv"), str):
        values["kv"] = KvTypes.parse(values["kv"], ALL_TYPES)
    if isinstance(values.get("template"), str):
        values["template"] = Path(values["template"])
    return _build(LoadConfig, values)


def runtime_to_wire(config: RuntimeConfig) -> dict[str, Any]:
    """Return runtime settings as builtins."""
    return {**_values(config), "tiers": _values(config.tiers)}


def runtime_from_wire(wire: Mapping[str, Any]) -> RuntimeConfig:
    """Return the runtime settings. Raises UsageError for what are none."""
    values = dict(wire)
    if isinstance(values.get("tiers"), Mapping):
        values["tiers"] = _build(TierConfig, values["tiers"])
    return _build(RuntimeConfig, values)


def _values(config: LoadConfig | RuntimeConfig | TierConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    try:
        return kind(**values)
    except TypeError:
        raise UsageError(f"These are no settings of this version's {kind.__name__}.", "restart the server") from None


def _spelled(value: Any) -> str:
    return "auto" if value is None else str(value)
