"""What is written down of an engine beside its blocks: the model's name, and what its keys are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from localllm.models.disk import files

_NAME = "about.json"
_MOST_BYTES = 1 << 16


def leave_about(folder: Path, about: Mapping[str, str]) -> None:
    """Write down of an engine what it is, unless that is there. Raises OSError."""
    path = folder / _NAME
    if not os.path.lexists(path):
        files.write_atomic(path, json.dumps(dict(about)).encode(), mode=0o600)


def read_about(folder: Path) -> dict[str, str]:
    """Return what an engine's folder says of it; what is no text is left out, and of a file that makes no sense all."""
    try:
        about = json.loads(files.read_bounded(folder / _NAME, _MOST_BYTES))
        texts = {name: text for name, text in about.items() if isinstance(text, str)}
        "".join(texts.values()).encode()  # raises ValueError for half of a surrogate pair
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return texts
