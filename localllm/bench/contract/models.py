"""The models of a contract, found on this machine and checked against what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.bench.contract.terms import Contract, Model
from localllm.errors import HashMismatch, LocalLLMError, ModelRefused
from localllm.models.hashes import sha256_of
from localllm.models.info import ModelInfo, read_info
from localllm.models.resolve import resolve


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model as commands name it. `info` None: only its server knows it."""

    argument: str
    info: ModelInfo | None = None


def find_models(contract: Contract) -> Mapping[str, FoundModel]:
    """Return every model of the contract by its name there.

    Raises, naming the place in the contract: ModelNotFound, ModelRefused (malformed, or of another
    quantisation than is said), HashMismatch, UsageError for a reference that cannot be one.
    """
    return {model.name: _found(model) for model in contract.models}


def _found(model: Model) -> FoundModel:
    if model.named:
        return FoundModel(model.named)
    try:
        file = resolve(str(model.file or model.reference))
        info = read_info(file.path)
    except LocalLLMError as error:
        raise type(error)(f"{model.place}: {error.message}", error.hint) from None
    if model.quant and (info.quant or "").upper() != model.quant.upper():
        raise ModelRefused(
            f"{model.place}: {file.path.name} is {info.quant}, and the contract says {model.quant}.",
            f'quant = "{info.quant}"',
        )
    if model.sha256 and sha256_of(file.path) != model.sha256:
        raise HashMismatch(
            f"{model.place}: {file.path.name} has another SHA-256 than the contract says.", f"sha256sum {file.path}"
        )
    return FoundModel(str(file.path), info)
