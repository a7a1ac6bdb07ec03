"""Every shared template renders byte for byte as transformers does, or is refused in its own words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import TemplateError
from localllm.models.chat_template import ChatTemplate
from tests.models import templates
from tests.models.templates import BOS, CALLED, CHAT, EOS, NAMES, TOOLS

SYSTEM = {"role": "system", "content": "Be kind."}
REASONED = (
    {"role": "user", "content": "Think."},
    {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nfirst answer"},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "second", "reasoning_content": "new thought", "tool_calls": [templates.CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "20"},
)
CASES: dict[str, tuple[tuple[dict[str, Any], ...], bool]] = {
    "chat": (CHAT, False),
    "chat without system": (CHAT[1:], False),
    "tools": (CHAT, True),
    "call": ((SYSTEM, *CALLED), True),
    "result last": ((SYSTEM, *CALLED[:3]), True),
    "call without tool list": (CALLED, False),
}

GEMMA2_ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
# Templates that refuse a case, and the words in which they do.
REFUSED = {
    **{
        ("google-gemma-2-2b-it", case): "System role not supported" for case in ("chat", "tools", "call", "result last")
    },
    ("google-gemma-2-2b-it", "call without tool list"): GEMMA2_ALTERNATE,
    **{
        ("Kimi-K2-Instruct", case): "access to attribute 'append' of 'list' object is unsafe."
        for case in ("call", "result last", "call without tool list")
    },
}
# transformers hands an absent tool list over as None, which this one cannot loop over; we leave it undefined.
NEEDS_A_TOOL_LIST = {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}
# For these a turn without content is None (they ask `is none`); the others fail on None, or print the word.
ASKS_FOR_NONE = {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "Kimi-K2-Instruct"}


def reference(name: str, text: str, chat: tuple[dict[str, Any], ...], tools: Any, **kwargs: Any) -> str:
    """Render with transformers, content of a call as the template can take it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages: list[dict[str, Any]] = json.loads(json.dumps(chat))
    for message in messages:
        if message["content"] is None and name not in ASKS_FOR_NONE:
            message["content"] = ""
    if tools is None and name in NEEDS_A_TOOL_LIST:
        tools = []
    special = {"bos_token": BOS, "eos_token": EOS}
    rendered, _ = utils.render_jinja_template([messages], tools=tools, chat_template=text, **special, **kwargs)
    return str(rendered[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_template_renders_as_transformers_does(shared: Path, name: str, case: str) -> None:
    text = templates.source(shared, name)
    chat, with_tools = CASES[case]
    tools = list(TOOLS) if with_tools else None
    template = ChatTemplate(text, specials=templates.spellings(text), bos=BOS, eos=EOS)
    if (name, case) in REFUSED:
        with pytest.raises(Exception, match=r".") as theirs:
            reference(name, text, chat, tools, add_generation_prompt=True)
        with pytest.raises(TemplateError) as ours:
            template.render(chat, tools=tools or (), max_chars=100_000)
        assert str(theirs.value) == REFUSED[name, case]
        assert REFUSED[name, case] in ours.value.message
        return
    for add_generation_prompt in (True, False):
        wanted = reference(name, text, chat, tools, add_generation_prompt=add_generation_prompt)
        rendered = template.render(
            chat, tools=tools or (), add_generation_prompt=add_generation_prompt, max_chars=100_000
        )
        assert rendered.plain == wanted


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"google-gemma-2-2b-it", "Kimi-K2-Instruct"}))
def test_thinking_history_renders_as_transformers_does(shared: Path, name: str, thinking: bool) -> None:
    text = templates.source(shared, name)
    chat = copy.deepcopy(REASONED)
    if name == "openai-gpt-oss-120b":  # takes reasoning or content beside a call, not both
        chat[3]["content"] = ""
    template = ChatTemplate(text, specials=templates.spellings(text), bos=BOS, eos=EOS)
    rendered = template.render(chat, tools=TOOLS, max_chars=100_000, enable_thinking=thinking)
    wanted = reference(name, text, chat, list(TOOLS), add_generation_prompt=True, enable_thinking=thinking)
    assert rendered.plain == wanted


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"google-gemma-2-2b-it", "Kimi-K2-Instruct"}))
def test_json_text_as_arguments_gives_the_same_call(shared: Path, name: str) -> None:
    text = templates.source(shared, name)
    template = ChatTemplate(text, specials=templates.spellings(text), bos=BOS, eos=EOS)
    chat = copy.deepcopy(CALLED)
    function = chat[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    wanted = template.render(CALLED, tools=TOOLS, max_chars=100_000).plain
    assert template.render(chat, tools=TOOLS, max_chars=100_000).plain == wanted


def test_every_shared_template_is_covered(shared: Path) -> None:
    assert {path.stem for path in (shared / "templates").glob("*.jinja")} == set(NAMES)


JINJA = {
    "loop controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tojson": "{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ tools|tojson(separators=(',', ':'), sort_keys=true) }}",
    "tojson ascii": "{{ messages|tojson(ensure_ascii=true) }}",
    "case": "{{ messages[0].content.upper() }}{{ messages[0].content|title }}{{ messages[0].content|capitalize }}",
    "format": (
        "{{ '%s|%5.1f|%-9s|%d%%'|format('a', 1.25, 'b', 3) }}"
        "{{ '{0}:{1!r:>9}:{x[role]}'.format(1, 'q', x=messages[0]) }}"
    ),
    "split": (
        "{{ 'a,b,,c'.split(',') }}{{ 'a b  c'.rsplit(none, 1) }}{{ 'a\nb\n'.splitlines() }}{{ 'a=b=c'.partition('=') }}"
    ),
    "lists": "{{ [3,1,2]|sort }}{{ [1,2,3,4]|batch(3, 0)|list }}{{ [1,2,3]|slice(2)|list }}{{ [1,1,2]|unique|list }}",
    "select": (
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('/') }}"
        "{{ [1,2,3]|reject('odd')|list }}"
    ),
    "dicts": (
        "{% for k, v in messages[0]|dictsort %}{{ k }}={{ v }};{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
    ),
    "indent": "{{ 'a\nb\n\nc'|indent(2) }}{{ 'a\nb\n\nc'|indent(width=2, first=true, blank=true) }}",
    "slices": "{{ messages[0].content[::-1] }}{{ messages[::-1]|length }}{{ 'abc'[1:] ~ 1 ~ none ~ true }}",
    "macro": (
        "{% macro m(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller else '' }}"
        "]{% endmacro %}{{ m(1) }}{% call m(3) %}x{% endcall %}"
    ),
    "set block": (
        "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}"
        "b{{ x }}{% endfilter %}{% with y=2 %}{{ y }}{% endwith %}"
    ),
    "replace": (
        "{{ 'aXbXc'|replace('X', '-', 1) }}{{ 'aXbXc'.replace('X', '') }}{{ 'xay'.strip('xy') }}{{ ' a '|trim }}"
    ),
    "numbers": (
        "{{ 7 // 2 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ 1.5|round }}{{ '12'|int + 1 }}{{ [1,2]|sum }}{{ -3|abs }}{{ 5/2 }}"
    ),
    "tests": (
        "{{ 1 is odd }}{{ x is defined }}{{ none is none }}"
        "{{ 'a' in 'abc' }}{{ 1 in [1] }}{{ 'k' in {'k': 1} }}{{ 2 > 1 > 0 }}"
    ),
    "loop": (
        "{% for a in 'abc' %}{{ loop.index }}{{ loop.last }}"
        "{{ loop.previtem }}{{ loop.cycle('x', 'y') }}{% else %}n{% endfor %}"
    ),
    "recursive": "{% for i in [[1],[2,[3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
    "truncate": (
        "{{ 'hello big world'|truncate(9) }}{{ 'ab'|center(6) }}"
        "{{ 'a b c'|wordcount }}{{ [1,2]|first }}{{ [1,2]|last }}"
    ),
    "escape": (
        "{{ '<a>&'|e }}{{ '<a>'|safe }}{{ messages|groupby('role')|length }}{{ [1,2]|reverse|list }}{{ [2,1]|min }}"
    ),
    "namespace": (
        "{% set ns = namespace(a=1) %}{% for i in range(3) %}"
        "{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ dict(a=1) }}"
    ),
}


@pytest.mark.parametrize("case", JINJA)
def test_jinja_itself_means_the_same(case: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [{"role": "user", "content": "one Two — ü"}, {"role": "assistant", "content": "b"}]
    theirs, _ = utils.render_jinja_template([copy.deepcopy(chat)], tools=list(TOOLS), chat_template=JINJA[case])
    ours = ChatTemplate(JINJA[case], specials=()).render(
        chat, tools=TOOLS, add_generation_prompt=False, max_chars=100_000
    )
    assert ours.plain == theirs[0]
