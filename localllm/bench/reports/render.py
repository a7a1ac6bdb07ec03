"""Writes a result document as what a reader wants: text for a terminal, Markdown, JSON or one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from localllm.bench.reports.contract_page import contract_page
from localllm.bench.reports.document import json_text, plain
from localllm.bench.reports.html import html
from localllm.bench.reports.markdown import markdown
from localllm.bench.reports.page import Page
from localllm.bench.reports.serve_page import serve_page
from localllm.bench.reports.text import WIDTH, text
from localllm.errors import UsageError

Form: TypeAlias = Literal["text", "md", "json", "html"]
FORMS: tuple[Form, ...] = get_args(Form)


def render(document: Mapping[str, Any], form: Form, width: int = WIDTH) -> str:
    """Return the document of `bench serve` or `bench run` in one of FORMS. `width`: of text alone.

    A document that was read back from its JSON gives the same. Raises: UsageError for any other document.
    """
    document = plain(document)
    page = page_of(document)
    match form:
        case "text":
            return text(page, width)
        case "md":
            return markdown(page)
        case "json":
            mark, *rest = document.items()
            return json_text(dict([mark, ("partial", bool(document.get("partial"))), *rest]))
        case "html":
            return html(page)


def page_of(document: Mapping[str, Any]) -> Page:
    """Return what there is to say of a document. Raises UsageError where it is of neither kind."""
    if document.get("localllm_bench_serve") == 1:
        return serve_page(document)
    if document.get("localllm_bench_contract") == 1:
        return contract_page(document)
    raise UsageError("This is no result of bench serve or bench run.", "localllm bench serve URL -o result.json")
