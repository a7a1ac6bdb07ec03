"""What a model is, read from its header: shape, kinds of layers, what it can do, split sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.errors import ModelNotFound, ModelRefused
from localllm.models.info import Kind, read_info, require_generation
from tests.models.ggufs import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    TYPE_F32,
    U16,
    U32,
    Gguf,
    key,
    model_keys,
    small_model,
    tensor,
    vocabulary_keys,
)


def write(file: Gguf, tmp_path: Path, name: str = "m.gguf") -> Path:
    return file.write(tmp_path / name)


def test_facts_of_a_dense_model(tmp_path: Path) -> None:
    file = small_model().with_keys(
        key("general.name", STRING, "Small One"),
        key("general.license", STRING, "apache-2.0"),
        key("general.file_type", U32, 15),
        key("general.quantized_by", STRING, "Somebody"),
        key("quantize.imatrix.dataset", STRING, "words.txt"),
        key("tokenizer.chat_template", STRING, "{{ messages }}"),
        key("tokenizer.chat_template.tool_use", STRING, "{{ tools }}"),
    )
    info = read_info(write(file, tmp_path))
    assert (info.kind, info.architecture, info.name, info.quant) == (Kind.MODEL, "llama", "Small One", "Q4_K_M")
    assert (info.n_layers, info.n_head, info.n_head_kv, info.n_embd) == (2, 2, (1, 1), 64)
    assert (info.head_sizes_k, info.head_sizes_v, info.n_ctx_train) == ((32,), (32,), 1024)
    assert (info.n_vocab, info.n_merges, info.n_ff, info.window_tokens) == (8, 2, 128, 0)
    assert info.n_params == 64 * 8 + 2 * 64 * 32
    assert (info.license, info.quantiser, info.imatrix) == ("apache-2.0", "Somebody", "words.txt")
    assert (info.chat_template, info.chat_templates) == ("{{ messages }}", {"tool_use": "{{ tools }}"})
    assert info.size_bytes == info.path.stat().st_size
    assert info.files == (info.path,)
    assert info.has_weights
    assert info.is_causal
    assert not info.is_recurrent
    assert not info.learned_positions
    require_generation(info)


def test_recommended_sampling_is_taken_over_but_never_a_penalty(tmp_path: Path) -> None:
    file = small_model().with_keys(
        key("general.sampling.temp", F32, 0.5),
        key("general.sampling.top_k", U32, 20),
        key("general.sampling.min_p", F32, float("nan")),
        key("general.sampling.penalty_repeat", F32, 1.1),
    )
    assert read_info(write(file, tmp_path)).sampling_defaults == {"temperature": 0.5, "top_k": 20}


def test_quantisation_without_a_file_type_is_that_of_most_weights(tmp_path: Path) -> None:
    q4 = Gguf(
        keys=model_keys(),
        tensors=(tensor("blk.0.ffn_up.weight", (256, 8), 12, 0), tensor("output_norm.weight", (64,), 0, 1152)),
        data=bytes(1152 + 256),
    )
    assert read_info(write(q4, tmp_path)).quant == "Q4_K"
    assert read_info(write(small_model(), tmp_path)).quant == "Q4_0"
    both = small_model().but(
        tensors=(tensor("a", (64, 32), 2, 0), tensor("b", (64, 32), 8, 1152)), data=bytes(1152 + 2176)
    )
    assert read_info(write(both, tmp_path)).quant == "mixed"


@pytest.mark.parametrize("field", ["block_count", "context_length", "embedding_length"])
def test_model_without_its_shape_is_refused(field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"llama.{field} is missing"):
        read_info(write(small_model(**{field: None}), tmp_path))


def test_context_of_0_is_refused(tmp_path: Path) -> None:
    file = small_model(context_length=key("llama.context_length", U32, 0))
    with pytest.raises(ModelRefused, match=r"llama\.context_length is 0"):
        read_info(write(file, tmp_path))


def test_file_without_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"general\.architecture is missing"):
        read_info(write(Gguf(keys=vocabulary_keys()), tmp_path))


EXPECTED_LAYERS = {
    # name: (window, hybrid, recurrent layers, window layers, K values by layer)
    "llama-dense": (0, False, [False, False], [False, False], [256, 256]),
    "qwen2-dense": (0, False, [False, False], [False, False], [256, 256]),
    "qwen3moe-moe": (0, False, [False, False], [False, False], [256, 256]),
    "gemma3-dense": (32, False, [False, False], [True, False], [256, 256]),
    "gpt-oss-moe": (32, False, [False, False], [True, False], [256, 256]),
    "deepseek2-moe": (0, False, [False, False], [False, False], [576, 576]),
    "granitehybrid-dense": (0, True, [False, True], [False, False], [256, 0]),
    "lfm2-dense": (32, True, [False, True], [True, False], [256, 0]),
    "qwen35-dense": (0, True, [True, False], [False, False], [0, 256]),
    "mamba2-dense": (0, False, [True, True], [False, False], [0, 0]),
}


@pytest.mark.parametrize("name", EXPECTED_LAYERS)
def test_layers_of_every_kind_of_architecture(name: str, tiny: Path) -> None:
    info = read_info(tiny / f"{name}.gguf")
    window, hybrid, recurrent, windowed, k_values = EXPECTED_LAYERS[name]
    assert (info.window_tokens, info.is_hybrid, info.is_recurrent) == (window, hybrid, any(recurrent))
    assert [layer.is_recurrent for layer in info.layers] == recurrent
    assert [layer.is_windowed for layer in info.layers] == windowed
    assert [layer.k_values for layer in info.layers] == k_values
    require_generation(info)


def test_latent_attention_stores_no_v(tiny: Path) -> None:
    info = read_info(tiny / "deepseek2-moe.gguf")
    assert [layer.v_values for layer in info.layers] == [0, 0]


def test_window_pattern_known_by_architecture_alone(tmp_path: Path) -> None:
    file = small_model(
        "gemma3",
        block_count=key("gemma3.block_count", U32, 7),
        window=key("gemma3.attention.sliding_window", U32, 512),
    )
    info = read_info(write(file, tmp_path))
    assert [layer.is_windowed for layer in info.layers] == [True] * 5 + [False, True]
    assert info.window_tokens == 512


def test_window_that_the_engine_ignores_is_none(tmp_path: Path) -> None:
    file = small_model("phi3", window=key("phi3.attention.sliding_window", U32, 512))
    info = read_info(write(file, tmp_path))
    assert (info.window_tokens, [layer.is_windowed for layer in info.layers]) == (0, [False, False])


def test_layers_that_share_kv_or_predict_ahead_store_none(tmp_path: Path) -> None:
    file = small_model(
        block_count=key("llama.block_count", U32, 6),
        ahead=key("llama.nextn_predict_layers", U32, 1),
        shared=key("llama.attention.shared_kv_layers", U32, 2),
    )
    info = read_info(write(file, tmp_path))
    assert [layer.k_values for layer in info.layers] == [32, 32, 32, 0, 0]


def test_learned_positions_are_known_by_tensor_or_architecture(tmp_path: Path) -> None:
    positions = small_model().but(tensors=(tensor("position_embd.weight", (64, 8), TYPE_F32, 0),), data=bytes(2048))
    assert read_info(write(positions, tmp_path)).learned_positions
    assert read_info(write(small_model("starcoder"), tmp_path)).learned_positions


NO_ANSWER = {
    "vocabulary": (small_model().but(tensors=(), data=b""), "vocabulary"),
    "encoder": (small_model("nomic-bert"), "embeddings"),
    "not causal": (small_model(causal=key("llama.attention.causal", BOOL, 0)), "embeddings"),
    "pooled": (small_model("qwen3", pooling=key("qwen3.pooling_type", U32, 3)), "embeddings"),
    "encoder-decoder": (small_model("t5"), "encoder-decoder"),
    "diffusion": (small_model("dream", causal=key("dream.attention.causal", BOOL, 0)), "token by token"),
    "adapter": (
        Gguf(keys=(key("general.type", STRING, "adapter"), key("general.architecture", STRING, "llama"))),
        "adapter",
    ),
    "projector": (Gguf(keys=(key("general.architecture", STRING, "clip"),)), "projector"),
    "imatrix": (Gguf(keys=(key("general.type", STRING, "imatrix"),)), "importance matrix"),
}


@pytest.mark.parametrize("name", NO_ANSWER)
def test_what_cannot_answer_is_refused_for_running_in_a_sentence(name: str, tmp_path: Path) -> None:
    file, words = NO_ANSWER[name]
    info = read_info(write(file, tmp_path))
    with pytest.raises(ModelRefused, match=words) as caught:
        require_generation(info)
    assert caught.value.hint


def test_unspecified_pooling_is_no_embedding_model(tmp_path: Path) -> None:
    file = small_model(pooling=key("llama.pooling_type", U32, 2**32 - 1))
    info = read_info(write(file, tmp_path))
    require_generation(info)
    assert not info.is_embedding_only


def test_vocabulary_files_are_told_from_models(shared: Path) -> None:
    for path in (shared / "models" / "vocab").glob("*.gguf"):
        info = read_info(path)
        assert (info.kind, info.has_weights, info.quant) == (Kind.VOCABULARY, False, "")
        assert info.n_vocab > 30_000


def split_set(tmp_path: Path, n_parts: int = 3) -> list[Path]:
    """Write a set of parts, one tensor each; only the first has the model's keys."""
    paths = []
    for index in range(n_parts):
        own = (
            key("split.no", U16, index),
            key("split.count", U16, n_parts),
            key("split.tensors.count", U32, n_parts),
        )
        file = Gguf(
            keys=own + (model_keys() + vocabulary_keys() if index == 0 else ()),
            tensors=(tensor(f"blk.{index}.ffn_up.weight", (64, 2), TYPE_F32, 0),),
            data=bytes(512),
        )
        paths.append(write(file, tmp_path, f"big-{index + 1:05d}-of-{n_parts:05d}.gguf"))
    return paths


def test_split_set_is_one_model_whichever_part_is_given(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    for path in paths:
        info = read_info(path)
        assert (info.path, info.files) == (paths[0], tuple(paths))
        assert (info.n_params, len(info.tensors), info.part_tensors) == (3 * 128, 3, (1, 1, 1))
        assert info.size_bytes == sum(part.stat().st_size for part in paths)


def test_incomplete_split_set_names_what_is_missing(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelRefused, match=r"big-00002-of-00003\.gguf"):
        read_info(paths[0])


def test_inconsistent_split_set_is_refused(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelRefused, match=r"split\.no"):
        read_info(paths[0])


def test_part_of_another_set_is_refused(tmp_path: Path) -> None:
    paths = split_set(tmp_path)
    write(
        Gguf(
            keys=(key("split.no", U16, 1), key("split.count", U16, 3)),
            tensors=(tensor("blk.0.ffn_up.weight", (64, 2), TYPE_F32, 0),),
            data=bytes(512),
        ),
        tmp_path,
        paths[1].name,
    )
    with pytest.raises(ModelRefused, match="in two parts"):
        read_info(paths[0])


def test_renamed_part_is_refused_with_the_name_it_needs(tmp_path: Path) -> None:
    path = split_set(tmp_path)[0].rename(tmp_path / "mine.gguf")
    with pytest.raises(ModelRefused, match=r"split\.count") as caught:
        read_info(path)
    assert "-00001-of-00003.gguf" in caught.value.hint


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_info(tmp_path / "nothing.gguf")


def test_per_layer_arrays_with_zeros_are_layers_without_attention(tmp_path: Path) -> None:
    heads = key("jamba.attention.head_count_kv", ARRAY, (U32, [0, 1]))
    file = small_model("jamba", attention__head_count_kv=heads)
    assert read_info(write(file, tmp_path)).n_head_kv == (0, 1)


@pytest.mark.real
def test_facts_of_the_default_model(smollm2: Path) -> None:
    info = read_info(smollm2)
    assert (info.architecture, info.quant, info.n_layers, info.n_vocab) == ("llama", "Q4_1", 30, 49_152)
    assert (info.n_head, set(info.n_head_kv), info.head_sizes_k, info.n_ctx_train) == (9, {3}, (64,), 8192)
    assert (info.n_params, info.license) == (134_515_008, "apache-2.0")
    assert "<|im_start|>" in (info.chat_template or "")
    require_generation(info)
