"""Finds the file behind a served model, where it lies on this machine, so that a result names its bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.bench.serving.endpoint import Endpoint
from localllm.errors import LocalLLMError
from localllm.models.info import ModelInfo

if TYPE_CHECKING:
    from localllm.backends.llamacpp.model import LlamaModel


def known_info(endpoint: Endpoint, named: str | None = None) -> ModelInfo | None:
    """Return what the file of the model says; None where it is not certain which file that is.

    `named`: the model that our own server was started with. Else a server on loopback tells its file's path
    (llama.cpp), or, where it is ours, a stored model of that name and of exactly its size is taken.
    """
    from localllm import compose

    if named is not None:
        with suppress(LocalLLMError):
            return compose.find(named)[1]
        return None
    if not endpoint.target.is_here:
        return None
    props, card = endpoint.facts.get("props") or {}, endpoint.facts.get("model") or {}
    path = props.get("model_path")
    if isinstance(path, str) and Path(path).is_absolute() and Path(path).is_file():
        with suppress(LocalLLMError):
            return compose.find(path)[1]
    if card.get("owned_by") == "localllm":
        with suppress(LocalLLMError):
            found, info = compose.find(endpoint.model)
            size_bytes = sum(file.stat().st_size for file in found.files)
            return info if size_bytes == (card.get("meta") or {}).get("size") else None
    return None


def token_counter(info: ModelInfo | None) -> Callable[[str], int | None]:
    """Return what counts the tokens of a text by a model's vocabulary, loaded when it is first asked; None: not known.

    Nothing is counted where the vocabulary cannot be loaded here. The library stays loaded: for use after a run.
    """

    @cache
    def vocabulary() -> LlamaModel | None:
        from localllm import compose

        if info is None:
            return None
        with suppress(LocalLLMError):
            return compose.open_tokenizer(info.path)
        return None

    def count(text: str) -> int | None:
        opened = vocabulary()
        return None if opened is None else len(opened.tokenizer.encode(text, parse_special=False))

    return count
