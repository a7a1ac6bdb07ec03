"""The keys of a server: from a file or a variable, never from the command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from localllm.cli.output import Notes
from localllm.errors import UsageError

VARIABLE = "LOCALLLM_API_KEY"
MIN_CHARACTERS = 8
MAX_CHARACTERS = 4096
MAX_BYTES = 1 << 20


def read_api_keys(file: Path | None, notes: Notes) -> tuple[bytes, ...]:
    """Return the keys in `file`, one a line, else the one in LOCALLLM_API_KEY, which is then taken out of the
    environment; () for none.

    So no process started later inherits it. Tells where others could read the file.
    Raises: UsageError for a key that is too short, too long, or not one word of plain ASCII, and for a file of none.
    """
    held = os.environ.pop(VARIABLE, None)
    if file is not None:
        return _keys_in(file, notes)
    if held is not None:
        return (_checked(os.fsencode(held).strip(), f"The key in {VARIABLE}", f"unset {VARIABLE}"),)
    return ()


def read_api_key(file: Path | None, notes: Notes) -> bytes | None:
    """Return the key that a client sends: the first of those there are, None for none. Raises as `read_api_keys`."""
    return next(iter(read_api_keys(file, notes)), None)


def _keys_in(file: Path, notes: Notes) -> tuple[bytes, ...]:
    hint = f"openssl rand -hex 32 > {file}"
    data = _read(file, notes)
    if len(data) > MAX_BYTES:
        raise UsageError(f"The key file {file} has more than {MAX_BYTES} bytes.", hint)
    lines = [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"There is no key in {file}.", hint)
    keys = [_checked(key, f"The key in line {number} of {file}", hint) for number, key in lines]
    return tuple(dict.fromkeys(keys))


def _read(file: Path, notes: Notes) -> bytes:
    try:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                notes.say(f"note: others may read or change {file} (chmod 600 {file})")
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read the key file {file}: {error.strerror}.", "check --api-key-file") from None


def _checked(key: bytes, where: str, hint: str) -> bytes:
    if not MIN_CHARACTERS <= len(key) <= MAX_CHARACTERS:
        raise UsageError(f"{where} must have {MIN_CHARACTERS} to {MAX_CHARACTERS} characters.", hint)
    if not all(0x21 <= byte <= 0x7E for byte in key):
        raise UsageError(f"{where} must be one word of printable ASCII.", hint)
    return key
