"""What file names say."""

from __future__ import annotations

import pytest

from localllm.models.filenames import NamedSet, choose_quant, group, is_model, quant_of


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Q4_K_M/Model-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("m.f16.gguf", "F16"),
        ("m-BF16.gguf", "BF16"),
        ("Qwen3-Q8_0-finetune-Q5_K_S.gguf", "Q5_K_S"),
        ("model.gguf", None),
        ("qwen2.5-7b.gguf", None),
    ],
)
def test_the_quantisation_is_the_last_one_named(name: str, quant: str | None) -> None:
    assert quant_of(name) == quant


def test_side_files_are_no_models() -> None:
    assert is_model("m-Q4_K_M.gguf")
    for name in (
        "mmproj-m-F16.gguf",
        "m.mmproj-f16.gguf",
        "imatrix_unsloth.gguf.x",
        "m-imatrix.gguf",
        "README.md",
        "x.bin",
    ):
        assert not is_model(name)


def test_parts_are_put_together_and_missed() -> None:
    names = ["b-00002-of-00003.gguf", "b-00001-of-00003.gguf", "a-Q8_0.gguf", "mmproj-a.gguf", "c-00004-of-00003.gguf"]
    assert group(names) == [
        NamedSet("a-Q8_0", ("a-Q8_0.gguf",)),
        NamedSet("b", ("b-00001-of-00003.gguf", "b-00002-of-00003.gguf"), ("b-00003-of-00003.gguf",)),
        NamedSet("c", ("c-00004-of-00003.gguf",)),
    ]


def test_a_quantisation_is_matched_as_a_whole_word() -> None:
    sets = group(["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-Q4_K.gguf", "m-Q4_K_M_L.gguf", "m-IQ4_K.gguf"])
    assert [one.stem for one in choose_quant(sets, "q4_k_m")] == ["m-Q4_K_M"]
    assert [one.stem for one in choose_quant(sets, "Q4_K")] == ["m-Q4_K"]
    assert [one.stem for one in choose_quant(sets, "UD-Q4_K_M")] == ["m-UD-Q4_K_M"]
    assert choose_quant(sets, "Q4") == []
    only_ud = group(["m-UD-Q4_K_M.gguf", "m-Q8_0.gguf"])
    assert [one.stem for one in choose_quant(only_ud, "Q4_K_M")] == ["m-UD-Q4_K_M"]
