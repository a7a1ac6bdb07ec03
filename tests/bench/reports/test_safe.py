from __future__ import annotations

import pytest

from localllm.bench.reports.safe import html_text, markdown_text, one_line


@pytest.mark.parametrize(
    "hostile", ["\x1b[2J", "\x1b]0;title\x07", "a\x00b", "\u202egnp.exe", "\u2066x", "\udc80", "\x9b1m"]
)
def test_what_moves_a_terminal_is_replaced(hostile: str) -> None:
    shown = one_line(f"x{hostile}y")
    assert "\ufffd" in shown
    assert all(character.isprintable() or character == "\ufffd" for character in shown)
    shown.encode()


def test_lines_become_one_and_ordinary_text_stays() -> None:
    assert one_line("a\n  b\tc\r\nd") == "a b c d"
    assert one_line("Qwen3-0.6B é 模型 👩\u200d💻") == "Qwen3-0.6B é 模型 👩\u200d💻"


def test_html_text_has_no_tag_and_no_quote() -> None:
    assert html_text("<script>\"'&]]>") == "&lt;script&gt;&quot;&#x27;&amp;]]&gt;"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a\\|b"),
        ("<b>x</b>", "&lt;b&gt;x&lt;/b&gt;"),
        ("[x](javascript:1)", "\\[x\\](javascript:1)"),
        ("`rm`", "\\`rm\\`"),
        ("*a* _b_ a_b", "\\*a\\* \\_b\\_ a_b"),
        ("# head", "\\# head"),
        ("## head", "\\## head"),
        ("-", "-"),
        ("-1", "-1"),
        ("---", "\\---"),
        ("- item", "\\- item"),
        ("1. item", "\\1. item"),
        ("&lt;i&gt;", "&amp;lt;i&amp;gt;"),
        ("smollm2:135m Q4_K_M", "smollm2:135m Q4_K_M"),
    ],
)
def test_markdown_shows_just_the_text(text: str, shown: str) -> None:
    assert markdown_text(text) == shown
