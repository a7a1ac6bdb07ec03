"""Refuses headers whose shape numbers contradict each other or the tensors.

Native code believes them: each rule here is one that ends its process (an assertion, or a division
that never returns) when the header breaks it, found by loading models with one number changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from localllm.models.architectures import NO_ROTATION, ROTATES_WHOLE_HEADS
from localllm.models.fields import Fields
from localllm.models.gguf import TensorInfo, refusal, shown
from localllm.models.layers import Layer

MAX_EXPERTS = 1024
MAX_GATING_FUNCTION = 4
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")


def check_consistency(fields: Fields, layers: tuple[Layer, ...], tensors: Mapping[str, TensorInfo]) -> None:
    """Do nothing for a header that agrees with itself. Raises ModelRefused naming the field that does not."""
    check = _Check(fields)
    check.draft_layers()
    check.experts()
    check.embedding(tensors)
    check.rope_scaling()
    check.latent_attention(layers)
    for index, layer in enumerate(layers):
        check.kv_width(index, layer, tensors)
        check.query_width(index, layer, tensors)
        check.convolution(index, layer, tensors)
    check.rotation(layers)


class _Check:
    """One header under test."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    def refuse(self, name: str, what: str) -> NoReturn:
        raise refusal(self.fields.file, shown(f"{self.fields.architecture}.{name}"), what)

    def draft_layers(self) -> None:
        ahead, blocks = self.fields.integer("nextn_predict_layers", 0), self.fields.integer("block_count", 0)
        if blocks and not 0 <= ahead < blocks:
            self.refuse("nextn_predict_layers", f"is {ahead:,} of {blocks} layers in all")

    def experts(self) -> None:
        count, used = self.fields.integer("expert_count", 0), self.fields.integer("expert_used_count", 0)
        groups = self.fields.integer("expert_group_count", 0)
        if not 0 <= count <= MAX_EXPERTS:
            self.refuse("expert_count", f"is {count:,}; at most {MAX_EXPERTS} are possible")
        if not 0 <= used <= count or (count and not used):
            self.refuse("expert_used_count", f"is {used:,} of {count} experts")
        if groups and (not 0 < groups < count or count % groups):
            self.refuse("expert_group_count", f"is {groups:,} for {count} experts")
        gating = self.fields.integer("expert_gating_func", 0)
        if not 0 <= gating <= MAX_GATING_FUNCTION:
            self.refuse("expert_gating_func", f"is {gating:,}; functions 0 to {MAX_GATING_FUNCTION} are known")
        chosen = self.fields.integer("expert_group_used_count", 0)
        if groups > 1 and not 0 < chosen <= groups:
            self.refuse("expert_group_used_count", f"is {chosen:,} of {groups} groups")

    def embedding(self, tensors: Mapping[str, TensorInfo]) -> None:
        tensor, width = tensors.get("token_embd.weight"), self.fields.integer("embedding_length", 0)
        if tensor is not None and tensor.shape and tensor.shape[0] != width:
            self.refuse(
                "embedding_length", f"is {width:,}, but the tensor {tensor.name} has rows of {tensor.shape[0]:,}"
            )

    def latent_attention(self, layers: tuple[Layer, ...]) -> None:
        """Latent attention (MLA) keeps one head: the latent part, then the rotated part."""
        key = self.fields.integer("attention.key_length_mla", 0)
        rank = self.fields.integer("attention.kv_lora_rank", 0)
        if not key or not rank:
            return
        rotated = self.fields.integer("rope.dimension_count", 0)
        stored = self.fields.integer("attention.key_length", rank + rotated)
        if stored != rank + rotated:
            self.refuse("attention.key_length", f"is {stored}; latent attention stores {rank} + {rotated} values")
        if key <= rotated:
            self.refuse("attention.key_length_mla", f"is {key}; {rotated} of it are rotated")
        most = max((layer.n_head_kv for layer in layers), default=0)
        if most > 1:
            self.refuse("attention.head_count_kv", f"is {most}; latent attention has one")

    def rope_scaling(self) -> None:
        name = "rope.scaling.type"
        value = self.fields.metadata.get(f"{self.fields.architecture}.{name}", "none")
        if value not in _ROPE_SCALING:
            self.refuse(name, f"is {shown(repr(value))}; known are {', '.join(_ROPE_SCALING)}")

    def rotation(self, layers: tuple[Layer, ...]) -> None:
        architecture = self.fields.architecture
        if architecture in NO_ROTATION:
            return
        full = [layer.head_size_k for layer in layers if layer.k_values and not layer.is_windowed]
        windowed = [layer.head_size_k for layer in layers if layer.k_values and layer.is_windowed]
        for name, sizes in (("rope.dimension_count", full), ("rope.dimension_count_swa", windowed)):
            rotated = self.fields.integers(name)
            if not rotated or not sizes:
                continue
            if min(rotated) <= 0 or any(size % 2 for size in rotated) or max(rotated) > max(sizes):
                self.refuse(name, f"is {max(rotated):,}; it must be even and at most the head size, {max(sizes)}")
            if architecture in ROTATES_WHOLE_HEADS and rotated != [max(sizes)]:
                self.refuse(name, f"is {max(rotated)}; {architecture} rotates whole heads of {max(sizes)}")

    def kv_width(self, index: int, layer: Layer, tensors: Mapping[str, TensorInfo]) -> None:
        if not layer.k_values and not layer.v_values:
            return
        for side, name, values in (("k", "key_length", layer.k_values), ("v", "value_length", layer.v_values)):
            tensor = tensors.get(f"blk.{index}.attn_{side}.weight")
            if tensor is not None and len(tensor.shape) == 2 and tensor.shape[1] != values:
                self.refuse(
                    f"attention.{name}",
                    f"times the KV heads gives {values:,} values in layer {index}, "
                    f"but the tensor {tensor.name} makes {tensor.shape[1]:,}",
                )

    def query_width(self, index: int, layer: Layer, tensors: Mapping[str, TensorInfo]) -> None:
        tensor, values = tensors.get(f"blk.{index}.attn_q.weight"), layer.n_head * layer.head_size_k
        if tensor is None or len(tensor.shape) != 2 or not layer.k_values or not layer.v_values:
            return
        # Some models make a gate as wide as the query in the same tensor.
        gated = self.fields.architecture not in ROTATES_WHOLE_HEADS and tensor.shape[1] == 2 * values
        if tensor.shape[1] != values and not gated:
            self.refuse(
                "attention.head_count",
                f"times the head size gives {values:,} values in layer {index}, "
                f"but the tensor {tensor.name} makes {tensor.shape[1]:,}",
            )

    def convolution(self, index: int, layer: Layer, tensors: Mapping[str, TensorInfo]) -> None:
        tensor = tensors.get(f"blk.{index}.ssm_conv1d.weight")
        if tensor is None or len(tensor.shape) != 2 or not layer.conv_values:
            return
        taps, channels = tensor.shape
        if (taps - 1) * channels != layer.conv_values:
            self.refuse(
                "ssm.inner_size",
                f"and the other ssm sizes give {layer.conv_values:,} values of convolution state, "
                f"but the tensor {tensor.name} needs {(taps - 1) * channels:,}",
            )
