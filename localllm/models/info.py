"""What a model is, as far as its files say: shape, quantisation, template, licence, what it can do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from localllm.errors import ModelRefused, pasteable
from localllm.models import architectures
from localllm.models.consistency import check_consistency
from localllm.models.fields import Fields
from localllm.models.gguf import GgufArray, TensorInfo, refusal
from localllm.models.gguf.types import FILE_TYPES
from localllm.models.layers import Layer, layers_of, window_tokens_of
from localllm.models.split_set import read_set

_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"
_GUESSED_FILE_TYPE = 1024
_SPECIAL_TOKEN_TYPES = frozenset((2, 3, 4))  # unknown, control, user-defined

# Settings a file may recommend, by the names of our sampler; penalties are never taken over.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}


class Kind(Enum):
    """What a GGUF file holds."""

    MODEL = "model"
    VOCABULARY = "vocabulary"  # a model's header without its weights
    ADAPTER = "adapter"
    PROJECTOR = "projector"  # the image or audio half of a multimodal model
    IMATRIX = "imatrix"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of one model. Sizes in bytes, lengths in tokens; "" or None where a file does not say.

    `files`: all parts of a split set, in order. `quant`: the file type's name ("Q4_K_M"), else that
    of most weights, else "mixed". `layers`: those that run. `window_tokens`: 0 = no window.
    `sampling_defaults`: what the file recommends, by the sampler's field names (never a penalty).
    `tensors`: all weights, for placement and memory; offsets are within their own part.
    `special_ids`: tokens that are not plain text (unknown, control, user-defined), as the file types them.
    """

    path: Path
    files: tuple[Path, ...]
    kind: Kind
    architecture: str
    name: str
    size_bytes: int
    n_params: int
    quant: str
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_merges: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    layers: tuple[Layer, ...]
    window_tokens: int
    is_causal: bool
    is_embedding_only: bool
    learned_positions: bool
    can_roll_back_state: bool
    chat_template: str | None
    chat_templates: Mapping[str, str]
    license: str | None
    quantiser: str | None
    imatrix: str | None
    source_url: str | None
    sampling_defaults: Mapping[str, float]
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    part_tensors: tuple[int, ...] = field(repr=False)
    special_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def n_layers(self) -> int:
        """Layers that run."""
        return len(self.layers)

    @property
    def n_head(self) -> int:
        """Attention heads of the layer that has most."""
        return max((layer.n_head for layer in self.layers), default=0)

    @property
    def n_head_kv(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        return tuple(layer.n_head_kv for layer in self.layers)

    @property
    def head_sizes_k(self) -> tuple[int, ...]:
        """Head sizes of K that occur in the KV cache."""
        return tuple(sorted({layer.head_size_k for layer in self.layers if layer.k_values}))

    @property
    def head_sizes_v(self) -> tuple[int, ...]:
        """Head sizes of V that occur in the KV cache."""
        return tuple(sorted({layer.head_size_v for layer in self.layers if layer.v_values}))

    @property
    def reads_v_from_k(self) -> bool:
        """Latent attention (MLA): there is no V cache, so K and V must have one type."""
        return any(layer.k_values and not layer.v_values for layer in self.layers)

    @property
    def has_weights(self) -> bool:
        """False for a vocabulary without a model."""
        return bool(self.tensors)

    @property
    def is_recurrent(self) -> bool:
        """Some of its state cannot be cut at a position: recurrent or hybrid."""
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def is_hybrid(self) -> bool:
        """Recurrent layers, and attention beside them."""
        return self.is_recurrent and any(layer.k_values for layer in self.layers)


def read_info(path: Path) -> ModelInfo:
    """Read the facts of the model at `path`, with all other parts of its split set.

    Any part of a set may be given; `path` of the result is the first one, which the engine opens.
    Raises: ModelNotFound; ModelRefused for a bad header or a set that is incomplete or inconsistent.
    """
    headers = read_set(path)
    fields = Fields(headers[0])
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    kind = _kind(fields, tensors)
    is_model = kind in (Kind.MODEL, Kind.VOCABULARY)
    layers = _layers(fields, tensors) if is_model else ()
    return ModelInfo(
        path=headers[0].path,
        files=tuple(header.path for header in headers),
        kind=kind,
        architecture=fields.architecture,
        name=fields.text("general.name") or headers[0].path.stem,
        size_bytes=sum(header.file_bytes for header in headers),
        n_params=sum(tensor.n_values for tensor in tensors),
        quant=_quant(fields, tensors),
        n_ctx_train=fields.integer("context_length", 0),
        n_embd=fields.integer("embedding_length", 0),
        n_vocab=_length(fields, _TOKENS) or fields.integer("vocab_size", 0),
        n_merges=_length(fields, "tokenizer.ggml.merges"),
        n_ff=max(fields.integer("feed_forward_length", 0), fields.integer("expert_feed_forward_length", 0)),
        n_expert=fields.integer("expert_count", 0),
        n_expert_used=fields.integer("expert_used_count", 0),
        layers=layers,
        window_tokens=window_tokens_of(fields) if is_model else 0,
        is_causal=fields.flag("attention.causal", fields.architecture not in architectures.ENCODERS),
        is_embedding_only=_embeds_only(fields),
        learned_positions=_learned_positions(fields, tensors),
        can_roll_back_state=fields.architecture in architectures.ROLLS_BACK,
        chat_template=fields.text(_TEMPLATE),
        chat_templates=_named_templates(fields),
        license=fields.text("general.license") or fields.text("general.license.name"),
        quantiser=fields.text("general.quantized_by"),
        imatrix=fields.text("quantize.imatrix.dataset") or fields.text("quantize.imatrix.file"),
        source_url=fields.text("general.source.url") or fields.text("general.repo_url"),
        sampling_defaults=_sampling(fields),
        tensors=tensors,
        part_tensors=tuple(len(header.tensors) for header in headers),
        special_ids=_special_ids(fields),
    )


def require_generation(info: ModelInfo) -> None:
    """Do nothing for a model that can answer. Raises ModelRefused with the reason for all others."""
    name, listing = info.path.name, "localllm ls"
    if info.kind is Kind.VOCABULARY:
        raise ModelRefused(
            f"{name} holds a vocabulary without weights; it cannot answer.",
            pasteable("localllm", "show", str(info.path)),
        )
    if info.kind is Kind.ADAPTER:
        raise ModelRefused(f"{name} is an adapter (LoRA), to be used on top of a model, not a model itself.", listing)
    if info.kind is Kind.PROJECTOR:
        raise ModelRefused(
            f"{name} is the image or audio projector of a multimodal model, not a model itself.", listing
        )
    if info.kind is Kind.IMATRIX:
        raise ModelRefused(f"{name} is an importance matrix for quantising, not a model.", listing)
    if info.is_embedding_only:
        raise ModelRefused(f"{name} ({info.architecture}) only makes embeddings; it cannot generate text.", listing)
    if info.architecture in architectures.ENCODER_DECODERS:
        raise ModelRefused(
            f"{name} ({info.architecture}) is an encoder-decoder model, which is not supported.", listing
        )
    if info.architecture in architectures.DIFFUSION or not info.is_causal:
        raise ModelRefused(
            f"{name} ({info.architecture}) does not generate token by token, so it is not supported.", listing
        )


def _layers(fields: Fields, tensors: tuple[TensorInfo, ...]) -> tuple[Layer, ...]:
    """Return the layers of a model whose header says what it must and agrees with its tensors."""
    for name in ("block_count", "embedding_length", "context_length"):
        fields.require(name)
    layers = layers_of(fields, tensors)
    check_consistency(fields, layers, {tensor.name: tensor for tensor in tensors})
    return layers


def _kind(fields: Fields, tensors: tuple[TensorInfo, ...]) -> Kind:
    declared = (fields.text("general.type") or "").lower()
    if declared == "adapter" or fields.text("adapter.type"):
        return Kind.ADAPTER
    if declared in ("mmproj", "clip-vision") or fields.architecture in ("clip", "mmproj"):
        return Kind.PROJECTOR
    if declared == "imatrix":
        return Kind.IMATRIX
    if not fields.architecture:
        raise refusal(fields.file, "general.architecture", "is missing")
    return Kind.MODEL if tensors else Kind.VOCABULARY


def _quant(fields: Fields, tensors: tuple[TensorInfo, ...]) -> str:
    declared = fields.number("general.file_type") if tensors else None
    if isinstance(declared, int) and declared & ~_GUESSED_FILE_TYPE in FILE_TYPES:
        return FILE_TYPES[declared & ~_GUESSED_FILE_TYPE]
    values: Counter[str] = Counter()
    for tensor in tensors:
        values[tensor.type.name] += tensor.n_values
    if not values:
        return ""
    most, amount = values.most_common(1)[0]
    return most if amount > 0.75 * values.total() else "mixed"


def _length(fields: Fields, key: str) -> int:
    value = fields.metadata.get(key)
    return len(value) if isinstance(value, GgufArray) else 0


def _special_ids(fields: Fields) -> tuple[int, ...]:
    types = fields.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, GgufArray):
        return ()
    return types.positions_of(_SPECIAL_TOKEN_TYPES)


def _embeds_only(fields: Fields) -> bool:
    pooling = fields.integer("pooling_type", 0)
    if fields.architecture in architectures.ENCODERS or 1 <= pooling <= 4:
        return True
    return fields.architecture not in architectures.DIFFUSION and not fields.flag("attention.causal", True)


def _learned_positions(fields: Fields, tensors: Iterable[TensorInfo]) -> bool:
    return fields.architecture in architectures.LEARNED_POSITIONS or any(
        t.name == "position_embd.weight" for t in tensors
    )


def _named_templates(fields: Fields) -> Mapping[str, str]:
    prefix = _TEMPLATE + "."
    return MappingProxyType(
        {
            key.removeprefix(prefix): value
            for key, value in fields.metadata.items()
            if key.startswith(prefix) and isinstance(value, str) and value
        }
    )


def _sampling(fields: Fields) -> Mapping[str, float]:
    found = {}
    for key, name in _SAMPLING.items():
        value = fields.number(f"general.sampling.{key}")
        if value is not None and math.isfinite(value) and value >= 0:
            found[name] = value
    return MappingProxyType(found)
