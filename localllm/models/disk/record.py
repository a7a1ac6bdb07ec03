"""Our own small files: JSON with magic, version, length and checksum, written whole, set aside when bad."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.models.disk import files

LIMIT_BYTES = 16 << 20


class Damaged(Exception):
    """The file is not what was written."""


class Newer(Exception):
    """The file was written by a later version, which still needs it."""


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()


def encode(kind: str, version: int, payload: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record; `payload` must be JSON values."""
    body = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    head = {"magic": f"localllm {kind}", "version": version, "length": len(body), "checksum": _checksum(body)}
    return (json.dumps({**head, "payload": payload}, sort_keys=True, indent=1) + "\n").encode()


def decode(data: bytes, kind: str, version: int) -> dict[str, Any]:
    """Return the payload of a record. Raises Damaged, Newer."""
    try:
        record = json.loads(data)
        if not isinstance(record, dict) or record.get("magic") != f"localllm {kind}":
            raise Damaged("not a record of this kind")
        found = record.get("version")
        if isinstance(found, int) and found > version:
            raise Newer(str(found))
        payload = record.get("payload")
        if found != version or not isinstance(payload, dict):
            raise Damaged("unknown version or no payload")
        body = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise Damaged(str(error)) from error
    if record.get("length") != len(body) or record.get("checksum") != _checksum(body):
        raise Damaged("length or checksum does not match")
    return payload


def save(path: Path, kind: str, version: int, payload: Mapping[str, Any], *, mode: int = 0o644) -> None:
    """Write a record whole or not at all. Raises OSError."""
    files.write_atomic(path, encode(kind, version, payload), mode=mode)


def load(path: Path, kind: str, version: int) -> dict[str, Any] | None:
    """Return the payload at `path`, or None where there is none that can be used. Never raises.

    A damaged file is renamed to `NAME.bad` and told once; one of a later version is left alone.
    """
    try:
        return decode(files.read_bounded(path, LIMIT_BYTES), kind, version)
    except (FileNotFoundError, NotADirectoryError, Newer):
        return None
    except PermissionError as error:
        _warn(f"cannot read {path}: {error.strerror}")
        return None
    except (OSError, ValueError, Damaged) as error:
        discard(path, str(error))
        return None


def discard(path: Path, reason: str) -> None:
    """Set a bad record aside and say so; nothing happens where the folder cannot be written."""
    moved = files.set_aside(path)
    if moved is not None:
        _warn(f"{path} was damaged ({reason}); it is kept as {moved.name}")


def _warn(message: str) -> None:
    import logging  # costs start-up time, and hardly ever is anything damaged

    logging.getLogger("localllm").warning(message)
