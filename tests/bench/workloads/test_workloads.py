"""Every shipped workload: the same for a seed, well formed, of the lengths that it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.bench.workloads.digest import digest
from localllm.bench.workloads.parameters import rules
from localllm.bench.workloads.parse import parse_workload
from localllm.bench.workloads.registry import shipped
from tests.bench.workloads.asking import CHATS, SHIPPED, asks_of, flat, taken

# Of the first four sessions. Whoever changes one on purpose raises GENERATOR in recipe.py.
DIGESTS = {
    "chat": "c274c6061fbd17ea757b9f184547cbcd1514e62d99947f7929effc5f063771cb",
    "rag": "7e7174a06fbf4836e63839d8ffc2d182770afda40e693f31547d8af946edaf14",
    "agent": "d574eed331bd8594c59bb843dadcc0daf9400a8e5c0182ab0f7bc203c63c3187",
    "code-edit": "34648824564c49d729785899109bc1d4932ceae2a2ddb959b7343e0091b42dca",
    "json": "817e454884a6944a3dabe5a16f3d3aa2564b121a20b95be7fbffac307b0576bf",
    "story": "6123285cb5a2467662db3de6343ad0e961dd2b953da45fca4e99d33710f03e1e",
    "fim": "f573745d83246b97cba8c296e220eb5cb455bd8a96aa3bff8851f924d2135088",
    "batch": "dace94ddb7cab5614f17b950f20f6ee45c070e37f5411d5cbf6c9ebbff601154",
    "chat:turns=2,system=0,spread=1.5": "6f314e9451b55e056f73f62f64436b1f371be1810dea8621630657f2c8aa9dcf",
    "agent:choice=required,tools=30,steps=1": "10c60b63a3bee2101d8d9cfa69321d3bc2969e4863d33f7ed432981f0554df28",
    "rag:documents=2,document=2000": "0f280859240d8db2649c6a05da41a71d22e7cea30eaae905560f5243b741611e",
    "mixed:chat=.6,rag=.3,story=.1": "c496d207ea15c6c18b2ca6e608f9d225aeda0f94c1430da0455ed92d216c233d",
}


@pytest.mark.parametrize("text", DIGESTS)
def test_a_seed_gives_the_same_bytes_everywhere(text: str) -> None:
    assert digest(parse_workload(text), 1) == DIGESTS[text]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_seed_gives_the_same_again_and_another_something_else(name: str) -> None:
    workload = parse_workload(name)
    assert taken(name, 3) == taken(name, 3)
    assert len({digest(workload, seed, n_sessions=1) for seed in (0, 1, 2, -1, 1 << 70)}) == 5
    assert digest(workload, 1, n_sessions=2) != digest(workload, 1, n_sessions=3)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_ask_is_its_workloads_and_differs_from_all_others(name: str) -> None:
    asks = asks_of(name, 12)
    assert {ask.kind for ask in asks} == {name}
    assert len({flat(ask) for ask in asks}) == len(asks)
    assert all(ask.max_tokens >= 1 for ask in asks)
    assert all((ask.prompt is None) == bool(ask.messages) for ask in asks)
    assert all(len(session) == parse_workload(name).facts["requests_per_session"] for session in taken(name, 3))


@pytest.mark.parametrize("name", CHATS)
def test_roles_take_turns_and_the_last_is_not_the_assistants(name: str) -> None:
    for ask in asks_of(name, 4):
        roles = [message["role"] for message in ask.messages]
        told = roles[1:] if roles[0] == "system" else roles
        assert told[0] == "user"
        assert told[-1] in ("user", "tool")
        assert "system" not in told
        for before, after in pairwise(told):
            assert (before == "assistant") == (after != "assistant")


def test_agents_history_answers_its_calls_by_the_tools_that_are_given() -> None:
    for ask in asks_of("agent:tools=20,steps=5", 4):
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in ask.tools}
        assert len(tools) == 20
        waiting: dict[str, str] = {}
        for message in ask.messages:
            for call in message.get("tool_calls", ()):
                assert re.fullmatch(r"[a-zA-Z0-9]{9}", call["id"])
                schema = tools[call["function"]["name"]]
                arguments = json.loads(call["function"]["arguments"])
                assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                waiting[call["id"]] = call["function"]["name"]
            if message["role"] == "tool":
                assert waiting.pop(message["tool_call_id"]) == message["name"]
        assert not waiting


def test_the_tool_choice_is_auto_unless_it_is_required() -> None:
    assert {ask.tool_choice for ask in asks_of("agent", 2)} == {"auto"}
    assert {ask.tool_choice for ask in asks_of("agent:choice=required", 2)} == {"required"}


@pytest.mark.parametrize("name", SHIPPED)
def test_answers_have_the_stated_lengths(name: str) -> None:
    stated = parse_workload(name).facts["lengths"].get("answer")
    asks = asks_of(name, 80)
    assert {ask.is_free for ask in asks} == {name in ("chat", "rag", "story", "fim")}
    if stated is None:
        assert name == "code-edit"
    elif stated["shape"] == "constant":
        assert {ask.max_tokens for ask in asks} == {stated["median"]}
    else:
        assert fmean(ask.max_tokens for ask in asks) == pytest.approx(stated["mean"], rel=0.15)
        assert stated["least"] <= min(ask.max_tokens for ask in asks)
        assert max(ask.max_tokens for ask in asks) <= stated["most"]


def _parts(text: str) -> Iterator[tuple[str, float, float]]:
    """Yield a part's name, its mean words and what was stated."""
    workload = parse_workload(text)
    stated = {name: of.get("mean", of["median"]) for name, of in workload.facts["lengths"].items()}
    asks = asks_of(text, 60)
    last = fmean(len(ask.messages[-1]["content"].split()) for ask in asks) if asks[0].messages else 0.0
    systems = {ask.messages[0]["content"] for ask in asks} if asks[0].messages else set()
    system = fmean(len(content.split()) for content in systems) if systems else 0.0
    match asks[0].kind:
        case "chat":
            yield "user", last, stated["user"]
            replies = [message for ask in asks for message in ask.messages if message["role"] == "assistant"]
            yield "reply", fmean(len(reply["content"].split()) for reply in replies), stated["reply"]
        case "rag":
            yield "document", system - 39, stated["document"]
            yield "question", last, stated["question"]
        case "agent":
            yield "system", system, stated["system"]
            results = [message for ask in asks for message in ask.messages if message["role"] == "tool"]
            yield "result", fmean(len(result["content"].split()) for result in results), stated["result"]
            yield "task", fmean(len(ask.messages[1]["content"].split()) for ask in asks), stated["task"]
        case "code-edit":
            yield "file", system - 40, stated["file"]
        case "json":
            yield "text", last, stated["text"]
        case "story":
            yield "prompt", last, stated["prompt"]
        case "fim":
            first = [session[0] for session in taken(text, 60)]
            yield "before", fmean(len(str(ask.prompt).split()) for ask in first), stated["before"]
            yield "after", fmean(len(str(ask.suffix).split()) for ask in first), stated["after"]
        case "batch":
            yield "instruction", system, stated["instruction"]
            yield "item", last, stated["item"]


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in SHIPPED if name != "rag"),  # four documents have no mean
        "rag:documents=60,question=40",
        "agent:system=3000,result=20",
        "story:prompt=200",
        "chat:user=150",
        "batch:instruction=900,item=60",
        "json:text=150",
        "code-edit:file=600",
        "fim:before=600,after=200",
    ],
)
def test_parts_have_the_stated_mean_lengths(text: str) -> None:
    for name, found, stated in _parts(text):
        assert found == pytest.approx(stated, rel=0.15, abs=4), name


@pytest.mark.parametrize(
    "text",
    [
        "chat:system=20000,user=20000,turns=1",
        "rag:document=20000,documents=2",
        "agent:system=20000,result=20000,steps=1",
        "code-edit:file=20000,edits=1",
        "json:text=20000",
        "story:prompt=20000",
        "fim:before=20000,after=20000",
        "batch:instruction=20000,item=20000",
        "chat:turns=200,user=10,reply=10",
        "agent:tools=100,branches=50",
    ],
)
def test_long_parts_are_made_too(text: str) -> None:
    (session,) = taken(f"{text},spread=0", 1)
    assert len(flat(session[-1]).split()) > 3_000
    if "20000" in text:
        assert len(flat(session[-1]).split()) == pytest.approx(20_000 * text.count("20000"), rel=0.1, abs=1_500)


@pytest.mark.parametrize("name", SHIPPED)
def test_facts_are_plain_values_that_json_keeps(name: str) -> None:
    facts = parse_workload(name).facts
    assert json.loads(json.dumps(facts)) == facts
    assert {"effect", "generator", "parameters", "lengths", "shared", "repeated_share"} <= facts.keys()
    assert not parse_workload(name).is_trace


@st.composite
def small_specs(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(SHIPPED))
    pairs = []
    for key, _, rule in rules(shipped()[name].parameters):
        if rule.words:
            pairs.append(f"{key}={draw(st.sampled_from(rule.words))}")
        elif rule.is_whole:
            most = min(int(rule.most), 300 if rule.unit else 9)
            pairs.append(f"{key}={draw(st.integers(int(rule.least), most))}")
        else:
            pairs.append(f"{key}={draw(st.integers(0, int(rule.most * 1000))) / 1000}")
    return f"{name}:{','.join(pairs)}"


@given(small_specs(), st.integers())
@settings(max_examples=80, deadline=None)
def test_all_allowed_values_give_sessions(spec: str, seed: int) -> None:
    workload = parse_workload(spec)
    facts = workload.facts
    assert 0 <= facts["repeated_share"] <= facts["before_last_share"] <= 1
    for session in taken(spec, 2, seed):
        assert len(session) == facts["requests_per_session"]
        for ask in session:
            assert ask.max_tokens >= 1
            assert all(message["content"] or message.get("tool_calls") for message in ask.messages)
            assert ask.prompt is None or "\n" in ask.prompt


def test_text_of_a_workload_is_not_one_phrase_again_and_again() -> None:
    for name in ("chat", "rag", "story", "batch", "json"):
        asks = asks_of(name, 40)
        at = 0 if name == "rag" else -1
        last = list({ask.messages[at]["content"]: None for ask in asks})
        words = [word for text in last for word in text.split()]
        assert len(set(words)) > 220, name
        triples = [tuple(words[at : at + 3]) for at in range(len(words) - 2)]
        assert len(set(triples)) > 0.6 * len(triples), name
