"""The key of a server: from a file or a variable, never from the command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from localllm.cli.output import Notes
from localllm.errors import UsageError

VARIABLE = "LOCALLLM_API_KEY"
MIN_CHARACTERS = 8
MAX_BYTES = 4096


def read_api_key(file: Path | None, notes: Notes) -> bytes | None:
    """Return the key in `file`, else in LOCALLLM_API_KEY, which is then taken out of the environment; None for none.

    So no process started later inherits it. Tells where others could read the file.
    Raises: UsageError for a key that is empty, too short, or not plain ASCII on one line.
    """
    held = os.environ.pop(VARIABLE, None)
    if file is not None:
        return _checked(_read(file, notes), f"The key in {file}", f"openssl rand -hex 32 > {file}")
    if held is not None:
        return _checked(os.fsencode(held), f"The key in {VARIABLE}", f"unset {VARIABLE}")
    return None


def _read(file: Path, notes: Notes) -> bytes:
    try:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                notes.say(f"note: others may read or change {file} (chmod 600 {file})")
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read the key file {file}: {error.strerror}.", "check --api-key-file") from None


def _checked(data: bytes, where: str, hint: str) -> bytes:
    key = data.strip()
    if not MIN_CHARACTERS <= len(key) <= MAX_BYTES:
        raise UsageError(f"{where} must have {MIN_CHARACTERS} to {MAX_BYTES} characters.", hint)
    if not all(0x21 <= byte <= 0x7E for byte in key):
        raise UsageError(f"{where} must be one word of printable ASCII.", hint)
    return key
