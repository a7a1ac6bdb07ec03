"""Makes what servers, files and people wrote harmless: in a terminal, in Markdown, in HTML."""

from __future__ import annotations

import html
import re
import unicodedata

REPLACEMENT = "�"
_ENTITY = re.compile(r"&(?=#?\w+;)")
_MARKS = re.compile(r"([\\`*\[\]|~])")
_EDGE_UNDERSCORE = re.compile(r"(?<!\w)_|_(?!\w)")
_BLOCK = re.compile(r"^(\s*)([#+=-]|\d+[.)])(?=[\s#=-])")


def one_line(text: str) -> str:
    """Return `text` on one line without control characters: none moves a cursor, hides text or turns its direction."""
    return "".join(_harmless(character) for character in " ".join(text.split()))


def _harmless(character: str) -> str:
    # Cc: controls; Cs: surrogates, which no file can hold; Cf: invisible ones, of which joiners may stay.
    category = unicodedata.category(character)
    if category in ("Cc", "Cs") or (category == "Cf" and character not in "\u200c\u200d\u00ad"):
        return REPLACEMENT
    return character


def html_text(text: str) -> str:
    """Return `text` as it stands between tags or in a quoted attribute."""
    return html.escape(one_line(text), quote=True)


def markdown_text(text: str) -> str:
    """Return `text` as Markdown that shows just it: no tag, link, table border, heading or emphasis comes of it."""
    found = _ENTITY.sub("&amp;", one_line(text)).replace("<", "&lt;").replace(">", "&gt;")
    return _BLOCK.sub(r"\1\\\2", _EDGE_UNDERSCORE.sub(r"\\_", _MARKS.sub(r"\\\1", found)))
