"""What a benchmark found goes into the history; that it cannot be kept is a note and fails nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError


def keep_in_history(document: Mapping[str, Any], file: Path | None, notes: Notes) -> None:
    """Add a result to `localllm bench history`. `file`: where it was written."""
    from localllm.bench.history import remember

    try:
        remember(document, file)
    except (LocalLLMError, OSError) as error:
        notes.say(f"note: not kept for `localllm bench history`: {error}")
