"""GGUF headers, read under bounds: `read_header` is the door, the modules beside it are its parts."""

from localllm.models.gguf.reader import GgufHeader, TensorInfo, read_header
from localllm.models.gguf.source import refusal, shown
from localllm.models.gguf.values import GgufArray

__all__ = ["GgufArray", "GgufHeader", "TensorInfo", "read_header", "refusal", "shown"]
