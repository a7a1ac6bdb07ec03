"""`localllm show`: the facts of a header, in words and as a document."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.models import available
from tests.cli.conftest import Result
from tests.cli.test_ls import SHA256, put
from tests.models.ggufs import ARRAY, STRING, U32, key, small_model

Cli = Callable[..., Result]
TEMPLATE = "{{ bos_token }}{% for m in messages %}\n{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    keys = (key("general.license", STRING, "mit"), key("tokenizer.chat_template", STRING, TEMPLATE))
    return small_model().with_keys(*keys).write(tmp_path / "small-F32.gguf")


def test_facts_of_a_file_in_place(cli: Cli, model: Path) -> None:
    facts = cli("show", str(model), "--json").json()
    assert facts["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert (facts["architecture"], facts["n_layers"], facts["n_ctx_train"], facts["n_vocab"]) == ("llama", 2, 1024, 8)
    assert (facts["license"], facts["chat_template"], facts["in"]) == ("mit", TEMPLATE, "file")
    # Two layers, one KV head of 32 values, K and V in two bytes each.
    assert facts["kv_bytes_per_token"] == 2 * 32 * 2 * 2
    assert facts["sampling"] == {"temperature": 0.8, "min_p": 0.05}
    assert facts["cannot_answer"] is None
    assert "fits" not in facts


def test_text_names_the_same_facts(cli: Cli, model: Path) -> None:
    result = cli("show", str(model))
    rows = dict(line.split(None, 1) for line in result.out.splitlines())
    assert result.err == ""
    assert rows["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert rows["licence"] == "mit"
    assert rows["template"].startswith("yes, ")
    assert rows["context"] == "1,024 tokens trained"
    assert rows["KV"].split() == ["cache", "256", "bytes", "a", "token", "as", "f16"]


def test_kv_type_changes_the_bytes_a_token(cli: Cli, model: Path) -> None:
    assert cli("show", str(model), "--kv", "q8_0", "--json").json()["kv_bytes_per_token"] == 2 * 34 * 2


def test_stored_model_tells_its_provenance(cli: Cli) -> None:
    put("org/alpha")
    facts = cli("show", "alpha", "--json").json()
    assert (facts["sha256"], facts["source"], facts["revision"]) == (SHA256, "hf:org/alpha", "c0ffee")
    assert (facts["quantiser"], facts["license"], facts["in"]) == ("someone", "mit", "store")


def test_memory_gives_terms_verdict_and_largest_context(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = cli("show", str(model), "--memory", "--ctx", "512", "--json").json()
    assert facts["fits"] is True
    assert facts["largest_ctx"] == 1024
    assert facts["memory"]["n_ctx"] == 512
    assert facts["memory"]["kv_bytes"] == 512 * 256
    monkeypatch.setattr(available, "available_bytes", lambda: 1_000_000)
    assert cli("show", str(model), "--memory", "--json").json()["fits"] is False
    text = cli("show", str(model), "--memory")
    assert text.code == 0
    assert "does not fit" in text.out
    assert "1.0 MB, of which 900 kB may be used" in text.out


def test_context_beyond_all_reason_does_not_fit(cli: Cli, model: Path) -> None:
    facts = cli("show", str(model), "--memory", "--ctx", "999999999", "--json").json()
    assert facts["fits"] is False
    assert facts["largest_ctx"] == 1024


def test_context_beyond_the_trained_one_is_told(cli: Cli, model: Path) -> None:
    assert cli("show", str(model), "--memory", "--ctx", "1025", "--json").json()["fits"] is False
    assert "longer than the model was trained for" in cli("show", str(model), "--memory", "--ctx", "1025").out


def test_vocabulary_without_weights_is_shown_with_the_reason(cli: Cli, shared: Path) -> None:
    path = shared / "models" / "vocab" / "ggml-vocab-phi-3.gguf"
    result = cli("show", str(path), "--memory")
    assert result.code == 0
    assert "vocabulary without weights; it cannot answer" in result.out
    assert "memory cannot be estimated" in result.out


def test_control_characters_of_a_file_do_not_reach_the_terminal(cli: Cli, tmp_path: Path) -> None:
    keys = (key("general.license", STRING, "mit\x1b[2J\nfake  row"), key("general.name", STRING, "a\x07b"))
    out = cli("show", str(small_model().with_keys(*keys).write(tmp_path / "bad.gguf"))).out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "mit\\x1b[2J\\nfake  row" in out


@pytest.mark.parametrize(
    ("name", "data"), [("noise.gguf", b"not a model" * 10), ("empty.gguf", b""), ("cut.gguf", b"GGUF\x03\0\0\0")]
)
def test_file_that_is_no_model_ends_with_3_and_a_sentence(cli: Cli, tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    result = cli("show", str(tmp_path / name))
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error: ")
    assert name in result.err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["smollm2:135m"], 3),
        (["nothing"], 3),
        (["./nothing.gguf"], 3),
        (["MODEL", "--ctx", "many"], 2),
        (["MODEL", "--ctx", "0"], 2),
        (["MODEL", "--kv", "q3"], 2),
        ([], 2),
    ],
)
def test_refusals(cli: Cli, model: Path, argv: list[str], code: int) -> None:
    result = cli("show", *(str(model) if word == "MODEL" else word for word in argv))
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")


def test_quantised_kv_that_the_heads_do_not_divide_is_refused(cli: Cli, tmp_path: Path) -> None:
    heads = {"attention__head_count": 4, "attention__head_count_kv": 2}  # of 16 values
    keys = {name: key(f"llama.{name.replace('__', '.')}", U32, value) for name, value in heads.items()}
    path = small_model(**keys).write(tmp_path / "m.gguf")
    result = cli("show", str(path), "--kv", "q8_0")
    assert result.code == 2
    assert "--kv f16" in result.err


def test_file_with_named_templates_lists_them(cli: Cli, tmp_path: Path) -> None:
    names = (key("tokenizer.chat_templates", ARRAY, (STRING, ["tool_use"])),)
    extra = key("tokenizer.chat_template.tool_use", STRING, "x")
    path = small_model().with_keys(*names, extra).write(tmp_path / "m.gguf")
    assert cli("show", str(path), "--json").json()["chat_templates"] == ["tool_use"]
