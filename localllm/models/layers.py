"""What each layer of a model keeps per token and per sequence, worked out from its header.

Source: the header fields of llama.cpp's converters; which layers do what is read off their
tensors where the header does not say, so a new architecture is understood without a list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from localllm.models.architectures import WINDOW_DEFAULTS, WINDOW_PERIODS
from localllm.models.fields import Fields
from localllm.models.gguf import TensorInfo

_RECURRENT_PARTS = ("ssm_", "shortconv.", "time_mix_")
_ATTENTION_PARTS = ("attn_k.", "attn_kv_a_mqa.", "attn_k_b.")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Sizes in values, not bytes; 0 where the layer has no such part.

    `k_values`, `v_values`: stored for each token of a sequence. `is_windowed`: only for the last
    `window_tokens`. `conv_values`, `state_values`: stored once a sequence, as f32.
    """

    n_head: int
    n_head_kv: int
    head_size_k: int
    head_size_v: int
    k_values: int = 0
    v_values: int = 0
    is_windowed: bool = False
    conv_values: int = 0
    state_values: int = 0

    @property
    def is_recurrent(self) -> bool:
        """The layer has state that cannot be cut at a position."""
        return self.conv_values + self.state_values > 0


def layers_of(fields: Fields, tensors: Iterable[TensorInfo]) -> tuple[Layer, ...]:
    """Return the layers that run (draft layers of multi-token prediction left out)."""
    parts = _parts_by_layer(tensors)
    n_layers = fields.n_layers
    heads = fields.per_layer("attention.head_count", 0)
    heads_kv = fields.per_layer("attention.head_count_kv", None) or heads
    windowed = _windowed(fields, n_layers)
    n_with_kv = n_layers - fields.integer("attention.shared_kv_layers", 0)
    conv, state = _state_values(fields, max(heads, default=0))
    layers = []
    for index in range(n_layers):
        names = parts.get(index, frozenset())
        recurrent = any(name.startswith(_RECURRENT_PARTS) for name in names)
        attends = not recurrent or any(name.startswith(_ATTENTION_PARTS) for name in names)
        layer = _attention(fields, heads[index], heads_kv[index], windowed[index], attends and index < n_with_kv)
        layers.append(replace(layer, conv_values=conv, state_values=state) if recurrent else layer)
    return tuple(layers)


def window_tokens_of(fields: Fields) -> int:
    """Return the attention window in tokens, 0 where every layer sees everything."""
    window = fields.integer("attention.sliding_window", WINDOW_DEFAULTS.get(fields.architecture, 0))
    if fields.architecture == "llama4":
        window = fields.integer("attention.chunk_size", window)
    return window if any(_windowed(fields, fields.n_layers)) else 0


def _parts_by_layer(tensors: Iterable[TensorInfo]) -> dict[int, frozenset[str]]:
    """Return the tensor names of each block, without `blk.N.`."""
    parts: dict[int, set[str]] = {}
    for tensor in tensors:
        pieces = tensor.name.split(".", 2)
        if len(pieces) == 3 and pieces[0] == "blk" and pieces[1].isascii() and pieces[1].isdigit():
            parts.setdefault(int(pieces[1]), set()).add(pieces[2])
    return {index: frozenset(names) for index, names in parts.items()}


def _windowed(fields: Fields, n_layers: int) -> list[bool]:
    if not fields.integer("attention.sliding_window", WINDOW_DEFAULTS.get(fields.architecture, 0)):
        return [False] * n_layers
    pattern = fields.integers("attention.sliding_window_pattern")
    if len(pattern) > 1 or (pattern and n_layers == 1):
        return [bool(pattern[index % len(pattern)]) for index in range(n_layers)]
    known = WINDOW_PERIODS.get(fields.architecture)
    if known is None and not pattern:
        return [False] * n_layers
    period, full_first = known or (0, False)
    period = pattern[0] if pattern else period
    if period <= 0:
        return [True] * n_layers
    full = 0 if full_first else period - 1
    return [index % period != full for index in range(n_layers)]


def _attention(fields: Fields, n_head: int, n_head_kv: int, windowed: bool, stores: bool) -> Layer:
    default = fields.integer("embedding_length", 0) // n_head if n_head else 0
    size_k = fields.integer("attention.key_length", default)
    size_v = fields.integer("attention.value_length", default)
    if windowed:
        size_k = fields.integer("attention.key_length_swa", size_k)
        size_v = fields.integer("attention.value_length_swa", size_v)
    # Latent attention (MLA) reads V out of the stored K.
    latent = fields.integer("attention.key_length_mla", 0) > 0
    return Layer(
        n_head,
        n_head_kv,
        size_k,
        size_v,
        k_values=size_k * n_head_kv if stores else 0,
        v_values=size_v * n_head_kv if stores and not latent else 0,
        is_windowed=windowed and stores,
    )


def _state_values(fields: Fields, n_head: int) -> tuple[int, int]:
    """Return the values of the convolution state and of the recurrent state of one layer."""
    n_embd = fields.integer("embedding_length", 0)
    head = fields.integer("wkv.head_size", 0)
    if head:
        return fields.integer("token_shift_count", 2) * n_embd, n_embd * head
    short = fields.integer("shortconv.l_cache", 0)
    if short:
        return n_embd * (short - 1), 0
    taps = max(fields.integer("ssm.conv_kernel", 0) - 1, 0)
    kda = fields.integer("kda.head_dim", 0)
    if kda:
        return 3 * taps * n_head * kda, kda * kda * n_head
    inner, size = fields.integer("ssm.inner_size", 0), fields.integer("ssm.state_size", 0)
    return taps * (inner + 2 * fields.integer("ssm.group_count", 0) * size), size * inner
