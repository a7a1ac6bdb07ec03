"""The catalog names what can be pulled, and what fits which machine."""

from __future__ import annotations

import re

import pytest

from localllm.models import catalog, reference
from localllm.models.catalog import CATALOG, GIB, best_for


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.alias)
def test_every_entry_can_be_pulled_and_checked(entry: catalog.CatalogEntry) -> None:
    ref = reference.parse(entry.reference)
    assert isinstance(ref, (reference.HubRef, reference.PypiRef))
    assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
    if isinstance(ref, reference.HubRef):
        assert ref.quant == entry.quant
        assert ref.revision is None
        assert re.fullmatch("[0-9a-f]{40}", entry.revision)
    assert reference.parse(entry.alias) == reference.Alias(entry.alias)
    assert entry.size_bytes < 0.8 * entry.min_memory_gb * GIB


def test_the_default_is_an_entry() -> None:
    assert catalog.find(catalog.DEFAULT_ALIAS) is not None


@pytest.mark.parametrize(
    ("gb", "first"),
    [(8, "qwen3.5:4b"), (16, "qwen3.5:9b"), (24, "gpt-oss:20b"), (32, "qwen3.6:35b-a3b"), (64, "qwen3-next:80b-a3b")],
)
def test_each_size_of_machine_gets_its_best(gb: int, first: str) -> None:
    reported = int(gb * GIB * 0.93)  # what the system says of it
    assert best_for(reported)[0].alias == first
    assert len(best_for(reported)) <= 3


def test_a_tiny_machine_gets_the_default_only() -> None:
    assert [entry.alias for entry in best_for(2 * GIB)] == ["smollm2:135m"]
    assert best_for(0) == ()
