"""The names of what the disk tier puts into its folder: nothing else there is its own to read, count or delete."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from localllm.runtime.kv.blocks import KEY_BYTES
from localllm.runtime.kv.disk_format import PARTIAL_SUFFIX, PINNED_SUFFIX, SUFFIX

ENGINE_BYTES = 12
"""Of the hash that names an engine's folder, in hex; its sub-folders are named after one byte."""

FileKind: TypeAlias = Literal["block", "pinned", "bad", "partial", "temporary"]

_ENGINE = re.compile(f"[0-9a-f]{{{2 * ENGINE_BYTES}}}")
_PART = re.compile("[0-9a-f]{2}")
_TOKEN = "[0-9a-f]{16}"  # as `files.token` makes them
_KEY = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_KINDS: tuple[tuple[FileKind, re.Pattern[str]], ...] = (
    ("block", re.compile(_KEY + re.escape(SUFFIX))),
    ("pinned", re.compile(_KEY + re.escape(PINNED_SUFFIX))),
    ("bad", re.compile(rf"{_KEY}({re.escape(PINNED_SUFFIX)}|{re.escape(SUFFIX)})(\.{_TOKEN})?\.bad")),
    ("partial", re.compile(rf"\.{_TOKEN}{re.escape(PARTIAL_SUFFIX)}")),
    ("temporary", re.compile(rf"\.{_TOKEN}\.tmp")),
)


def is_engine_folder(name: str) -> bool:
    """Say whether a folder of this name, in the folder of all engines, is one engine's."""
    return _ENGINE.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Say whether a folder of this name, in an engine's, holds blocks."""
    return _PART.fullmatch(name) is not None


def file_kind(name: str) -> FileKind | None:
    """Return what a file of this name is; None = nothing of ours.

    "bad": a block set aside. "partial": a block that is being written. "temporary": anything else that is.
    """
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(name)), None)
