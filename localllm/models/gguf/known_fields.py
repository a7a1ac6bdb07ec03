"""What well-known metadata fields must look like: native code believes them without looking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from localllm.models.gguf.source import refusal, shown
from localllm.models.gguf.types import VALUE_NAMES
from localllm.models.gguf.values import GgufArray, Value

DEFAULT_ALIGNMENT = 32
MAX_LAYERS = 512

_U32, _BOOL, _STRING = ("u32",), ("bool",), ("string",)
_INTEGER = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
_FLOAT = ("f32", "f64")

# Types of fields under `general.`, `tokenizer.` and `split.`: wrong ones are misread by native code.
_TYPES: dict[str, tuple[str, ...]] = {
    "general.architecture": _STRING,
    "general.type": _STRING,
    "general.name": _STRING,
    "general.license": _STRING,
    "general.alignment": _U32,
    "general.file_type": _INTEGER,
    "general.quantization_version": _INTEGER,
    "split.no": _INTEGER,
    "split.count": _INTEGER,
    "split.tensors.count": _INTEGER,
    "tokenizer.ggml.model": _STRING,
    "tokenizer.ggml.pre": _STRING,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.ggml.add_sep_token": _BOOL,
    "tokenizer.ggml.add_space_prefix": _BOOL,
    "tokenizer.ggml.remove_extra_whitespaces": _BOOL,
}

# Fields under `<architecture>.` with one value.
_MODEL_TYPES: dict[str, tuple[str, ...]] = {
    "block_count": _U32,
    "context_length": _U32,
    "embedding_length": _U32,
    "vocab_size": _INTEGER,
    "attention.key_length": _U32,
    "attention.value_length": _U32,
    "attention.kv_lora_rank": _U32,
    "attention.causal": _BOOL,
    "attention.layer_norm_epsilon": _FLOAT,
    "attention.layer_norm_rms_epsilon": _FLOAT,
    "rope.dimension_count": _U32,
    "expert_count": _U32,
    "expert_used_count": _U32,
    "ssm.conv_kernel": _U32,
    "ssm.inner_size": _U32,
    "ssm.state_size": _U32,
    "ssm.time_step_rank": _U32,
    "ssm.group_count": _U32,
    "shortconv.l_cache": _U32,
}

# Fields under `<architecture>.` with one value or one a layer; a layer's element is 32 bits wide.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")

# Arrays of the vocabulary and their element types; those with True run parallel to the tokens.
_ARRAYS: dict[str, tuple[str, bool]] = {
    "tokenizer.ggml.tokens": ("string", True),
    "tokenizer.ggml.scores": ("f32", True),
    "tokenizer.ggml.token_type": ("i32", True),
    "tokenizer.ggml.merges": ("string", False),
}


def check_fields(file: str, metadata: Mapping[str, Value], types: Mapping[str, int]) -> int:
    """Refuse metadata whose well-known fields have wrong types, counts or ranges; return the alignment.

    `types`: the declared value types. Raises: ModelRefused naming the field.
    """
    check = _Check(file, metadata, types)
    for key, allowed in _TYPES.items():
        check.type_of(key, allowed)
    for key in metadata:
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            check.type_of(key, _STRING)
        elif key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            check.type_of(key, _INTEGER)
    check.vocabulary()
    architecture = metadata.get("general.architecture")
    if isinstance(architecture, str):
        if not architecture:
            check.refuse("general.architecture", "is empty")
        check.model(architecture)
    return check.alignment()


class _Check:
    """One file's fields under test."""

    def __init__(self, file: str, metadata: Mapping[str, Value], types: Mapping[str, int]) -> None:
        self.file = file
        self.metadata = metadata
        self.types = types

    def refuse(self, key: str, what: str) -> NoReturn:
        raise refusal(self.file, shown(key), what)

    def type_of(self, key: str, allowed: tuple[str, ...]) -> None:
        """Refuse another type than those allowed, and text that is none."""
        if key not in self.metadata:
            return
        declared = VALUE_NAMES[self.types[key]]
        if declared not in allowed:
            wanted = "an integer" if allowed is _INTEGER else " or ".join(allowed)
            self.refuse(key, f"has the type {declared}; it must be {wanted}")
        value = self.metadata[key]
        if isinstance(value, str) and ("\0" in value or "\ufffd" in value):
            self.refuse(key, "is not text: it holds a NUL or is not valid UTF-8")

    def alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1):
            self.refuse("general.alignment", f"is {value}, not a power of two")
        return value

    def vocabulary(self) -> None:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        for key, (element, parallel) in _ARRAYS.items():
            array = self.metadata.get(key)
            if array is None:
                continue
            if not isinstance(array, GgufArray):
                self.refuse(key, f"is no array but a {VALUE_NAMES[self.types[key]]}")
            if len(array) and array.type_name != element:
                self.refuse(key, f"is an array of {array.type_name}; it must be one of {element}")
            if not parallel:
                continue
            if not isinstance(tokens, GgufArray):
                self.refuse(key, "is there, but tokenizer.ggml.tokens is not")
            if len(array) != len(tokens):
                self.refuse(key, f"has {len(array):,} elements for {len(tokens):,} tokens")
        if isinstance(tokens, GgufArray) and (repeated := tokens.first_repeat()) is not None:
            self.refuse("tokenizer.ggml.tokens", f"holds the token {shown(repr(repeated))} twice")

    def model(self, architecture: str) -> None:
        for name, allowed in _MODEL_TYPES.items():
            self.type_of(f"{architecture}.{name}", allowed)
        key = f"{architecture}.block_count"
        n_layers = self.metadata.get(key)
        if isinstance(n_layers, int) and not 1 <= n_layers <= MAX_LAYERS:
            self.refuse(key, f"is {n_layers:,}; a model has 1 to {MAX_LAYERS} layers")
        for name in _PER_LAYER:
            self._per_layer(f"{architecture}.{name}", n_layers)

    def _per_layer(self, key: str, n_layers: Value | None) -> None:
        value = self.metadata.get(key)
        if value is None:
            return
        if not isinstance(value, GgufArray):
            self.type_of(key, _U32)
            return
        if value.type_name not in ("u32", "i32"):
            self.refuse(key, f"is an array of {value.type_name}; it must be one of u32 or i32")
        if n_layers is not None and len(value) != n_layers:
            self.refuse(key, f"has {len(value):,} elements for {n_layers} layers")
