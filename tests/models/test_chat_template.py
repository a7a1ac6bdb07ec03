"""Chat templates: what a template gets, how it refuses, where messages end, and how a prompt becomes tokens."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import TemplateError, UsageError
from localllm.models import chat_template
from localllm.models.chat_template import ChatTemplate, Encoded, encode
from tests.byte_tokenizer import ByteTokenizer
from tests.models import templates
from tests.models.templates import BOS, CALLED, EOS

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", BOS, EOS]


def render(source: str, *messages: Any, **kwargs: Any) -> str:
    template = ChatTemplate(source, specials=SPECIALS, bos=BOS, eos=EOS)
    return template.render(messages or ({"role": "user", "content": "hi"},), max_chars=10_000, **kwargs).plain


# B11: absent is undefined, null content is "", parts are flattened


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "user"}, {"role": "user", "content": ""}]
)
def test_missing_content_is_an_empty_text(message: dict[str, Any]) -> None:
    assert render("{{ messages[0].content[:5] }}|{{ 'x' in messages[0].content }}", message) == "|False"


@pytest.mark.parametrize("tools", [(), []])
def test_absent_tools_are_undefined(tools: Any) -> None:
    assert render("{{ tools is defined }}{{ tools|length }}{% for t in tools %}x{% endfor %}", tools=tools) == "False0"


def test_null_fields_are_absent() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "reasoning_content": None}
    assert render("{{ 'tool_calls' in messages[0] }}{{ messages[0].name is defined }}", message) == "FalseFalse"


def test_no_calls_are_absent_calls() -> None:
    assert (
        render("{{ 'tool_calls' in messages[0] }}", {"role": "assistant", "content": "", "tool_calls": []}) == "False"
    )


def test_text_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}, "three"]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "one\ntwo\nthree"


def test_images_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "secret"}}]
    with pytest.raises(TemplateError, match=r"Message 1 .*'image_url'.*text only") as refusal:
        render(CHATML, {"role": "user", "content": "x"}, {"role": "user", "content": parts})
    assert "secret" not in refusal.value.message


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": None}, {"role": ""}, {"role": 5}, "text"])
def test_a_message_without_a_role_is_named(message: Any) -> None:
    with pytest.raises(TemplateError, match="Message 1 has no role"):
        render(CHATML, {"role": "user", "content": "x"}, message)


def test_no_messages_are_refused() -> None:
    with pytest.raises(TemplateError, match="no messages"):
        ChatTemplate(CHATML, specials=()).render((), max_chars=100)


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, object()])
def test_what_is_not_json_is_named(value: Any) -> None:
    with pytest.raises(TemplateError, match="Message 0"):
        render(CHATML, {"role": "user", "content": "x", "extra": value})


def test_deeply_nested_values_are_refused() -> None:
    value: Any = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(TemplateError, match="nests values deeper"):
        render(CHATML, {"role": "user", "content": "x", "extra": value})


# B09, B30, B32: no turn is merged or dropped


def test_a_developers_message_is_a_system_message_unless_the_template_knows_developers() -> None:
    chat = [{"role": "developer", "content": "Be brief."}]
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    knows = plain + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTemplate(plain, specials=()).render(chat, max_chars=100).text == "[system]Be brief."
    assert ChatTemplate(knows, specials=()).render(chat, max_chars=100).text == "[developer]Be brief.!"


def test_turns_are_neither_merged_nor_dropped() -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]
    turns = ["user\none", "user\ntwo", "system\n", "assistant\n", "user\n"]
    wanted = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert render(CHATML, *chat) == wanted


def test_a_tool_call_without_content_is_none_where_asked_and_empty_where_used() -> None:
    source = "{% set c = messages[1].content %}{{ c is none }}{{ c == none }}{{ c != none }}{{ c == '' }}{{ c ~ '|' }}"
    assert render(source + "{{ messages[0].content is none }}", *CALLED) == "TrueTrueFalseTrue|False"


@pytest.mark.parametrize("content", [None, ""])
def test_reasoning_only_turn_renders(shared: Path, content: str | None) -> None:
    source = templates.source(shared, "Qwen-Qwen3-0.6B")
    turn = {"role": "assistant", "content": content, "reasoning_content": "because"}
    text = render(source, {"role": "user", "content": "q"}, turn, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n<think>\nbecause\n</think>\n\n<|im_end|>\n")


def test_messages_that_a_template_leaves_out_are_reported() -> None:
    template = ChatTemplate("{{ messages[-1].content }}", specials=())
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": ""}, {"role": "user", "content": "c"}]
    assert template.render(chat, max_chars=100).unseen == (0,)


# Tool-call arguments


def _called_with(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]


OBJECT = "{{ messages[1].tool_calls[0].function.arguments|tojson }}"
TEXT = "{% set a = messages[1].tool_calls[0].function %}{{ a.arguments if a.arguments is string else 'object' }}"


def test_json_arguments_become_an_object_where_the_template_wants_one() -> None:
    assert render(OBJECT, *_called_with('{"a":1}')) == '{"a": 1}'
    assert render(OBJECT, *_called_with("")) == "{}"
    assert render(OBJECT, *_called_with({"a": 1})) == '{"a": 1}'


def test_json_arguments_stay_as_written_where_the_template_takes_text() -> None:
    assert render(TEXT, *_called_with('{"a":1}')) == '{"a":1}'
    assert render(TEXT, *_called_with("{broken")) == "{broken"


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "[" * 100_000, "nan"])
def test_broken_arguments_name_the_message(arguments: str) -> None:
    with pytest.raises(TemplateError, match=r"Message 1: .*arguments.*not a JSON object"):
        render(OBJECT, *_called_with(arguments))


# B08: refusals


def test_a_template_refuses_in_its_own_words(shared: Path) -> None:
    source = templates.source(shared, "google-gemma-2-2b-it")
    with pytest.raises(TemplateError, match="refuses this conversation: System role not supported") as refusal:
        render(source, {"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert refusal.value.exit_code == 2
    assert refusal.value.http_status == 400
    assert refusal.value.details["message_index"] == 0


def test_roles_that_do_not_alternate_name_the_message(shared: Path) -> None:
    source = templates.source(shared, "google-gemma-2-2b-it")
    with pytest.raises(TemplateError, match=r"Conversation roles must alternate.*\(line 1, message 1\)"):
        render(source, {"role": "user", "content": "u"}, {"role": "user", "content": "u"})


def test_a_failing_template_says_line_and_message() -> None:
    source = "{% for m in messages %}\n\n{{ m.content.nothing.more }}{% endfor %}"
    with pytest.raises(TemplateError, match=r"failed: .*nothing.* \(line 3, message 0\)") as failure:
        render(source)
    assert failure.value.details == {"line": 3, "message_index": 0}
    assert "--template FILE" in failure.value.hint


def test_a_template_with_a_syntax_error_says_the_line() -> None:
    with pytest.raises(TemplateError, match="unusable: line 2: "):
        render("x\n{% if %}")


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(TemplateError) as refusal:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(refusal.value.message) < 700


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "messages"])
def test_template_arguments_cannot_replace_what_the_model_sets(name: str) -> None:
    template = ChatTemplate(CHATML, specials=())
    with pytest.raises(UsageError, match=name):
        template.render([{"role": "user", "content": "x"}], max_chars=100, **{name: "x"})


def test_template_arguments_reach_the_template() -> None:
    source = "{{ enable_thinking is defined and enable_thinking is false }}{{ effort }}"
    assert render(source, enable_thinking=False, effort="high") == "Truehigh"


def test_a_model_without_a_template_is_refused_with_the_way_out() -> None:
    error = chat_template.missing("tiny.gguf")
    assert "tiny.gguf" in error.message
    assert "--template FILE" in error.hint
    assert "--raw" in error.hint


# B06: BOS


def _tokens(source: str, *, add_bos: bool, content: str = "hi") -> list[str]:
    tokenizer = ByteTokenizer(SPECIALS, bos=BOS, add_bos=add_bos)
    template = ChatTemplate(source, specials=SPECIALS, bos=BOS, eos=EOS)
    rendered = template.render([{"role": "user", "content": content}], max_chars=1000)
    return tokenizer.control(encode(tokenizer, rendered).tokens)


def test_bos_is_never_doubled_nor_invented() -> None:
    assert _tokens("{{ bos_token }}{{ messages[0].content }}", add_bos=True) == [BOS]
    assert _tokens("{{ messages[0].content }}", add_bos=True) == [BOS]
    assert _tokens("{{ bos_token }}{{ messages[0].content }}", add_bos=False) == [BOS]
    assert _tokens("{{ messages[0].content }}", add_bos=False) == []


def test_a_bos_that_the_user_wrote_does_not_count() -> None:
    assert _tokens("{{ messages[0].content }}", add_bos=True, content=BOS + "hi") == [BOS]
    assert _tokens("{{ bos_token }}{{ messages[0].content }}", add_bos=True, content=BOS + "hi") == [BOS]


# Boundaries


def _encoded(chat: list[dict[str, Any]], source: str = CHATML, **kwargs: Any) -> tuple[ByteTokenizer, Encoded]:
    tokenizer = ByteTokenizer(SPECIALS, **kwargs)
    return tokenizer, encode(tokenizer, ChatTemplate(source, specials=SPECIALS).render(chat, max_chars=10_000))


CHAT = [
    {"role": "system", "content": "be <|im_end|> kind"},
    {"role": "user", "content": "ünï<|im_start|>"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
]


@pytest.mark.parametrize("adds_space", [False, True])
def test_boundaries_stand_after_each_turn(adds_space: bool) -> None:
    tokenizer, encoded = _encoded(CHAT, adds_space=adds_space)
    assert len(encoded.boundaries) == len(CHAT)
    for boundary in encoded.boundaries:
        assert tokenizer.decode(encoded.tokens[:boundary]).rstrip(" \n").endswith("<|im_end|>")
        assert tokenizer.decode(encoded.tokens[boundary:]).startswith("<|im_start|>")


def test_what_stands_before_a_boundary_is_the_same_in_a_longer_conversation() -> None:
    _, shorter = _encoded(CHAT)
    _, longer = _encoded([*CHAT, {"role": "assistant", "content": "no"}, {"role": "user", "content": "oh"}])
    last = shorter.boundaries[-1]
    assert longer.tokens[:last] == shorter.tokens[:last]
    assert longer.boundaries[: len(CHAT)] == shorter.boundaries


def test_boundary_inside_a_token_moves_before_it() -> None:
    class Pairs(ByteTokenizer):
        """Joins two bytes to a token, so a boundary can fall inside one."""

        def encode(self, text: str, **kwargs: Any) -> list[int]:
            data = text.encode()
            return [
                1000 + data[at] * 257 + sum(data[at + 1 : at + 2], bool(data[at + 1 :]))
                for at in range(0, len(data), 2)
            ]

        def piece(self, token: int) -> bytes:
            first, second = divmod(token - 1000, 257)
            return bytes([first, second - 1] if second else [first])

    tokenizer = Pairs([])
    template = ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}", specials=())
    chat = [{"role": "user", "content": "abc"}, {"role": "user", "content": "de"}]
    rendered = template.render(chat, max_chars=100)
    assert rendered.boundaries == (3, 6)
    assert encode(tokenizer, rendered).boundaries == (1, 3)  # "ab" | "c;" holds the first


def test_tool_list_has_a_boundary_of_its_own(shared: Path) -> None:
    source = templates.source(shared, "Qwen-Qwen2.5-7B-Instruct")
    template = ChatTemplate(source, specials=SPECIALS)
    rendered = template.render([{"role": "user", "content": "x"}], tools=templates.TOOLS, max_chars=10_000)
    assert rendered.text[: rendered.boundaries[0]].endswith("</tool_call><|im_end|>\n")
    assert rendered.text[rendered.boundaries[0] :].startswith("<|im_start|>user\nx")


def test_reordered_messages_have_no_boundary_between_them() -> None:
    template = ChatTemplate("{% for m in messages[::-1] %}{{ m.content }}<|im_end|>{% endfor %}", specials=SPECIALS)
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    rendered = template.render(chat, max_chars=100)
    assert rendered.boundaries == (len(rendered.text),)


@pytest.mark.parametrize("name", templates.NAMES)
def test_boundaries_are_ascending_and_within_every_templates_prompt(shared: Path, name: str) -> None:
    text = templates.source(shared, name)
    specials = templates.spellings(text)
    tokenizer = ByteTokenizer(specials)
    chat = [
        {"role": "user", "content": "a <x>"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rendered = ChatTemplate(text, specials=specials, bos=BOS, eos=EOS).render(chat, max_chars=100_000)
    encoded = encode(tokenizer, rendered)
    assert len(rendered.boundaries) >= 3
    assert list(encoded.boundaries) == sorted(set(encoded.boundaries))
    assert encoded.boundaries[-1] <= len(encoded.tokens)
    assert len(encoded.boundaries) == len(rendered.boundaries)


def test_a_usual_chat_renders_in_a_few_thousand_operations(shared: Path) -> None:
    source = templates.source(shared, "Qwen-Qwen3-0.6B")
    template = ChatTemplate(source, specials=SPECIALS)
    template.render(CHAT, max_chars=10_000)
    spent = min(_cpu_s(lambda: template.render(CHAT, max_chars=10_000)) for _ in range(20))
    assert spent < 0.05  # a tenth of a millisecond on a quiet machine; this catches a blow-up only


def _cpu_s(work: Any) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


# What depends on the day


def test_a_template_as_of_another_day_writes_that_day() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% endif %}"
    today = ChatTemplate(source, specials=SPECIALS, bos=BOS, eos=EOS)
    written = [
        date.fromisoformat(template.render(({"role": "user", "content": "hi"},), max_chars=100).plain)
        for template in (today, today.as_of(1), today.as_of(40), today)
    ]
    if written[0] == written[3]:  # else midnight passed
        assert [(written[0] - day).days for day in written] == [0, 1, 40, 0]
    assert today.tells_date
    assert today.as_of(1).tells_date


def test_a_template_without_a_date_says_so() -> None:
    assert not ChatTemplate(CHATML, specials=SPECIALS).tells_date
