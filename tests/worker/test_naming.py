"""Which names lead to which model, and that requests cannot name files."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.errors import ModelNotFound, UsageError
from localllm.models.provenance import Provenance, StoredFile
from localllm.models.store import Store
from localllm.worker.naming import Known, choose, find_named, in_store, is_name


def model(name: str, *aliases: str) -> Known:
    path = Path(f"/models/{name}.gguf")
    return Known(name, path, (path,), None, aliases)


MODELS = [model("smollm2:135m", "small", "gpt-4"), model("org/Qwen3-4B:Q4_K_M"), model("org/Qwen3-8B:Q4_K_M")]


def gguf(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smollm2:135m", "smollm2:135m"),
        ("SmolLM2:135M", "smollm2:135m"),
        ("small", "smollm2:135m"),
        ("gpt-4", "smollm2:135m"),
        ("135m", "smollm2:135m"),
        ("qwen3-8b", "org/Qwen3-8B:Q4_K_M"),
        ("org/Qwen3-4B:Q4_K_M", "org/Qwen3-4B:Q4_K_M"),
    ],
)
def test_names_aliases_and_unique_parts_are_found(text: str, name: str) -> None:
    assert choose(text, MODELS).name == name


def test_an_exact_name_wins_over_those_that_contain_it() -> None:
    models = [model("qwen-long"), model("qwen")]
    assert choose("qwen", models).name == "qwen"


def test_an_unknown_name_lists_what_there_is_and_is_not_repeated() -> None:
    with pytest.raises(ModelNotFound) as caught:
        choose("canary-model", MODELS)
    assert "canary" not in caught.value.message
    assert all(one.name in caught.value.message for one in MODELS)


def test_a_part_of_several_names_lists_those() -> None:
    with pytest.raises(ModelNotFound, match="fits 2 models") as caught:
        choose("qwen3", MODELS)
    assert "smollm2" not in caught.value.message


def test_long_lists_are_cut() -> None:
    with pytest.raises(ModelNotFound, match="and 80 more"):
        choose("nothing", [model(f"m{i}") for i in range(100)])
    with pytest.raises(ModelNotFound, match="there are: none"):
        choose("nothing", [])


NO_NAMES = [
    *("", ".", "..", "/", "/etc/passwd", "../x", "a/../b", "a//b", "./m", "a/.", "~", "~/m", "a/", "\\", "C:\\m"),
    *("a b", "a\0b", "a\n", "a\r\n", "m%2e", "ü", "\u202em", "a?b", "a*", "$HOME", "`id`", "a;b", "'", '"', "<m>"),
    *("m" * 201, "http://x/y", "file:///etc", "hf://m", "\\\\host\\share", "m\u0000", " m", "m ", "\ud800"),
]


@pytest.mark.parametrize("text", NO_NAMES, ids=range(len(NO_NAMES)))
def test_what_could_lead_elsewhere_is_no_name(text: str) -> None:
    assert not is_name(text)
    with pytest.raises(ModelNotFound):
        choose(text, [*MODELS, model("passwd"), model("etc")])


@pytest.mark.parametrize("text", ["a", "a.b", "...", "org/m:Q4", "CON", "a-b_c", "m" * 200])
def test_plain_names_are_names(text: str) -> None:
    assert is_name(text)


def test_a_file_is_known_by_its_name_and_never_by_its_path(tmp_path: Path) -> None:
    path = gguf(tmp_path, "my model (1).gguf")
    (known,) = find_named([str(path)], [])
    assert known.name == "my-model-1-.gguf"
    assert known.aliases == ()
    assert (known.path, known.files, known.is_pinned) == (path, (path,), True)
    with pytest.raises(ModelNotFound):
        choose(str(path), [known])


def test_aliases_name_the_first(tmp_path: Path) -> None:
    first, second = gguf(tmp_path, "a.gguf"), gguf(tmp_path, "b.gguf")
    known = find_named([str(first), str(second)], ["gpt-4", "mini"])
    assert known[0].aliases == ("gpt-4", "mini")
    assert known[1].aliases == ()


@pytest.mark.parametrize("alias", ["", "a b", "../x", "b.gguf", "B.GGUF"])
def test_bad_aliases_are_refused(tmp_path: Path, alias: str) -> None:
    first, second = gguf(tmp_path, "a.gguf"), gguf(tmp_path, "b.gguf")
    with pytest.raises(UsageError):
        find_named([str(first), str(second)], [alias])


def test_an_alias_without_a_model_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a model"):
        find_named([], ["gpt-4"])


def test_the_same_file_named_twice_is_one_model(tmp_path: Path) -> None:
    path = gguf(tmp_path, "a.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    (known,) = find_named([str(path), str(path), str(link)], [])
    assert known.name == "a.gguf"
    assert known.aliases == ("link.gguf",)


def test_files_of_the_same_name_get_names_of_their_own(tmp_path: Path) -> None:
    paths = [gguf(tmp_path / folder, "m.gguf") for folder in ("x", "y", "z/y")]
    assert [one.name for one in find_named(list(map(str, paths)), [])] == ["m.gguf", "y/m.gguf", "m.gguf-2"]


def test_what_is_not_there_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        find_named([str(tmp_path / "none.gguf")], [])


def stored(name: str, content: str = "{}") -> Path:
    """Put a model into the store of this test's home."""
    store = Store()
    staging = store.staging(name)
    (staging / "m.gguf").write_text(content)
    facts = Provenance(
        name=name,
        source="",
        revision=None,
        files=(StoredFile("m.gguf", len(content), "0" * 64),),
        quant=None,
        license=None,
        quantiser=None,
        imatrix=None,
        pulled_at="",
    )
    return store.publish(staging, facts).path


def test_stored_models_are_known_by_their_names() -> None:
    path = stored("org/m:Q4")
    (known,) = in_store()
    assert (known.name, known.path, known.sha256, known.problem) == ("org/m:Q4", path, "0" * 64, "")
    assert not known.is_pinned


def test_a_stored_model_named_by_a_part_keeps_its_name_and_answers_to_what_was_typed() -> None:
    stored("org/model:Q4")
    (known,) = find_named(["model"], [])
    assert known.name == "org/model:Q4"
    assert known.aliases == ("model",)
    assert known.key == in_store()[0].key


def test_a_damaged_stored_model_is_known_with_its_problem() -> None:
    stored("org/m:Q4").unlink()
    assert "missing" in in_store()[0].problem


def test_a_changed_file_has_another_identity(tmp_path: Path) -> None:
    path = gguf(tmp_path, "a.gguf")
    (known,) = find_named([str(path)], [])
    before = known.identity()
    assert known.identity() == before
    path.write_text("{ }")
    assert known.identity() != before
    path.unlink()
    assert known.identity() == ()
