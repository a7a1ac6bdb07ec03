from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from localllm.bench.reports.document import json_text, serve_document
from localllm.bench.reports.render import FORMS, Form, render
from localllm.bench.reports.serve_page import PARTIAL
from localllm.errors import UsageError
from tests.bench.reports.made_up import FINGERPRINT, cold_and_warm, contract, made_up_run, sweep

DOCUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "serve": cold_and_warm,
    "sweep": sweep,
    "contract": lambda: contract(loads=(1, 4), n_rounds=2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_read_back_from_json_looks_the_same(name: str, form: Form) -> None:
    fresh = DOCUMENTS[name]()
    assert render(json.loads(json_text(fresh)), form) == render(fresh, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_partial_document_says_so_on_top(name: str, form: Form) -> None:
    whole = DOCUMENTS[name]()
    shown, complete = render(whole | {"partial": True}, form), render(whole, form)
    if form == "json":
        assert '"partial": true' in shown.splitlines()[2]
        assert '"partial": false' in complete.splitlines()[2]
        return
    assert PARTIAL in shown
    assert PARTIAL not in complete
    first_numbers = shown.index("Rules" if name == "contract" else "Result")
    assert shown.index(PARTIAL) < first_numbers


@pytest.mark.parametrize("form", FORMS)
def test_a_partial_run_without_a_single_request_can_be_shown(form: Form) -> None:
    nothing = serve_document([], fingerprint=FINGERPRINT, partial=True)
    assert "artial" in render(nothing, form)
    empty = made_up_run(1, n=0, partial=True)
    assert "artial" in render(serve_document([empty], fingerprint={}), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_contract_ended_before_its_first_round_can_be_shown(form: Form) -> None:
    bare = {"localllm_bench_contract": 1, "title": "t", "partial": True, "cells": [], "candidates": [], "rules": []}
    assert "artial" in render(bare, form)
    cell = {"candidate": "a", "workload": "chat", "cache": "cold", "load": "concurrency 1", "rounds": [], "n_used": 0}
    assert "artial" in render(bare | {"cells": [cell]}, form)


@pytest.mark.parametrize("document", [{}, {"localllm_bench_serve": 2}, {"localllm_bench": 1}])
def test_what_is_no_such_document_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        render(document, "text")
