"""Reads a model that is split over several files: complete and consistent, or refused."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from localllm.errors import ModelRefused
from localllm.models.filenames import group
from localllm.models.gguf import GgufHeader, read_header, refusal


def read_set(path: Path) -> list[GgufHeader]:
    """Read the headers of all parts of the set that `path` belongs to, in order; one for a file on its own.

    Raises: ModelNotFound; ModelRefused for a bad header, or a set that is incomplete or inconsistent.
    """
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [header]
    named = next((one for one in group(_siblings(path)) if path.name in one.files), None)
    if named is None or len(named.files) + len(named.missing) != count:
        raise refusal(
            path.name,
            "split.count",
            f"says it is one of {count} parts, which its name does not",
            f"give the parts their names back: NAME-00001-of-{count:05d}.gguf",
        )
    if named.missing:
        raise ModelRefused(
            f"{path.name} is one of {count} parts, and these are missing: {', '.join(named.missing[:5])}.",
            "fetch the missing parts into the same folder",
        )
    headers = [header if name == path.name else read_header(path.parent / name) for name in named.files]
    _check_set(headers, count)
    return headers


def _siblings(path: Path) -> list[str]:
    try:
        return os.listdir(path.parent)
    except OSError as error:
        raise ModelRefused(f"{path.parent} cannot be listed: {error.strerror}.", "localllm ls") from None


def _check_set(headers: list[GgufHeader], count: int) -> None:
    """Refuse parts that do not belong together."""
    names: Counter[str] = Counter(tensor.name for header in headers for tensor in header.tensors)
    for index, header in enumerate(headers):
        said = header.metadata.get("split.count"), header.metadata.get("split.no")
        if said != (count, index):
            raise refusal(header.path.name, "split.no", f"says part {said[1]} of {said[0]}, its name part {index}")
        if header.architecture not in ("", headers[0].architecture):
            raise refusal(header.path.name, "general.architecture", "differs from that of the first part")
        total = header.metadata.get("split.tensors.count", names.total())
        if total != names.total():
            raise refusal(header.path.name, "split.tensors.count", f"is {total}; the parts hold {names.total()}")
    twice = next((name for name, times in names.items() if times > 1), None)
    if twice is not None:
        raise refusal(headers[0].path.name, f"tensor {twice}", "is in two parts of the set")
