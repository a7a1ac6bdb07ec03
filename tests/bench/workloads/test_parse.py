"""Workloads are named by text: canonical, round, and refused in sentences."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.bench.workloads.parameters import Rule, rules
from localllm.bench.workloads.parse import NAMES, describe, parse_workload
from localllm.bench.workloads.registry import shipped
from localllm.errors import UsageError

SHIPPED = tuple(shipped())


def _values(rule: Rule) -> st.SearchStrategy[str]:
    if rule.words:
        return st.sampled_from(rule.words)
    if rule.is_whole:
        return st.integers(int(rule.least), int(rule.most)).map(str)
    thousandths = st.integers(int(rule.least * 1000), int(rule.most * 1000))
    return thousandths.flatmap(lambda n: st.sampled_from([f"{n / 1000:.3f}", f"{n / 1000:g}", f"{n / 1000}"]))


@st.composite
def specs(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(SHIPPED))
    known = {key: rule for key, _, rule in rules(shipped()[name].parameters)}
    keys = draw(st.lists(st.sampled_from(sorted(known)), unique=True))
    space = draw(st.sampled_from(["", " "]))
    pairs = [f"{key}{space}={space}{draw(_values(known[key]))}" for key in keys]
    return f"{name}:{','.join(pairs)}" if pairs else name


@st.composite
def mixes(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(SHIPPED), unique=True, min_size=1))
    weight = st.decimals("0.001", "999999.999", places=3).map(str) | st.integers(1, 999_999).map(str)
    return "mixed:" + ",".join(f"{name}={draw(weight)}" for name in names)


@given(specs() | mixes())
@settings(max_examples=150, deadline=None)
def test_the_canonical_text_gives_itself_and_the_same_facts(text: str) -> None:
    workload = parse_workload(text)
    again = parse_workload(workload.spec)
    assert again.spec == workload.spec
    assert again == workload
    assert " " not in workload.spec


def test_names_are_the_shipped_ones_and_the_two_special_ones() -> None:
    assert (*SHIPPED, "mixed", "replay") == NAMES


@pytest.mark.parametrize("name", SHIPPED)
def test_defaults_are_not_spelled(name: str) -> None:
    every = ",".join(f"{key}={default}" for key, default, _ in rules(shipped()[name].parameters))
    assert parse_workload(f"{name}:{every}").spec == name
    assert parse_workload(f" {name} ").spec == parse_workload(f"{name}:").spec == name


def test_a_spec_is_sorted_and_short() -> None:
    assert parse_workload("rag:spread=0.50,document=900,answer=48").spec == "rag:document=900,spread=0.5"
    assert parse_workload("agent:choice=required,branches=007").spec == "agent:branches=7,choice=required"
    assert parse_workload("chat:spread=.0").spec == "chat:spread=0"


@pytest.mark.parametrize("name", NAMES)
def test_a_description_names_every_parameter_with_default_and_bounds(name: str) -> None:
    text = describe(name)
    assert text.startswith(f"{name}: ")
    if name in SHIPPED:
        for key, default, rule in rules(shipped()[name].parameters):
            (line,) = [line for line in text.splitlines() if line.startswith(f"  {key}={default}: ")]
            assert rule.effect in line
            assert rule.allowed in line


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("chta", ("'chta'", "chat, rag"), "chat"),
        ("code_edit", ("'code_edit'",), "--workload code-edit"),
        ("RAG", ("'RAG'",), "--workload"),
        ("", ("''",), "--workload"),
        ("rag:documnts=3", ("rag", "'documnts'", "documents, document"), "rag:documents=4"),
        ("rag:document", ("rag", "'document'"), "rag:"),
        ("rag:document=", ("rag", "'document='"), "rag:"),
        ("rag:,", ("rag",), "rag:"),
        ("rag:document=0", ("rag", "document", "1 to 200000", "words", "'0'"), "rag:document=600"),
        ("rag:document=200001", ("rag", "document", "'200001'"), "rag:document=600"),
        ("rag:document=-5", ("rag", "document", "'-5'"), "rag:document=600"),
        ("rag:document=600.5", ("rag", "document", "whole", "'600.5'"), "rag:document=600"),
        ("rag:document=٦٠", ("rag", "document"), "rag:document=600"),
        ("rag:document=1e3", ("rag", "document", "'1e3'"), "rag:document=600"),
        ("rag:document=5,document=6", ("rag", "document", "twice"), "document"),
        ("rag:spread=2.1", ("rag", "spread", "0 to 2", "'2.1'"), "rag:spread=0.2"),
        ("rag:spread=.", ("rag", "spread", "'.'"), "rag:spread=0.2"),
        ("rag:spread=0.1234", ("rag", "spread", "three decimals"), "rag:spread=0.2"),
        ("rag:spread=nan", ("rag", "spread", "'nan'"), "rag:spread=0.2"),
        ("agent:choice=none", ("agent", "choice", "auto or required", "'none'"), "agent:choice=auto"),
        ("agent:tools=101", ("agent", "tools", "1 to 100", "'101'"), "agent:tools=8"),
        ("replay", ("replay", "file"), "replay:FILE"),
        ("replay:", ("replay", "file"), "replay:FILE"),
    ],
)
def test_what_cannot_be_is_refused_naming_workload_key_and_bounds(text: str, words: tuple[str, ...], hint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_workload(text)
    for word in words:
        assert word in refusal.value.message
    assert hint in refusal.value.hint
    assert refusal.value.message.endswith(".")


def test_a_number_of_absurd_length_is_refused_too() -> None:
    with pytest.raises(UsageError, match="document"):
        parse_workload(f"rag:document={'9' * 10_000}")


def test_an_unknown_name_cannot_be_described() -> None:
    with pytest.raises(UsageError, match="'stroy'"):
        describe("stroy")


def test_the_names_cost_no_start_up() -> None:
    script = "import sys, localllm.bench.workloads.parse; print('msgspec' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
