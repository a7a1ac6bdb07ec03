"""The shipped workloads, in the order in which help names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.bench.workloads.agent import AGENT
from localllm.bench.workloads.batch import BATCH
from localllm.bench.workloads.chat import CHAT
from localllm.bench.workloads.code_edit import CODE_EDIT
from localllm.bench.workloads.extraction import JSON
from localllm.bench.workloads.fim import FIM
from localllm.bench.workloads.rag import RAG
from localllm.bench.workloads.recipe import Recipe
from localllm.bench.workloads.story import STORY


def shipped() -> Mapping[str, Recipe[Any]]:
    """Return the shipped workloads by name."""
    recipes: tuple[Recipe[Any], ...] = (CHAT, RAG, AGENT, CODE_EDIT, JSON, STORY, FIM, BATCH)
    return {recipe.name: recipe for recipe in recipes}
