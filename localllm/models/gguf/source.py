"""The bytes of a header, read only as far as they are needed, and the one way to refuse them."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from localllm.errors import ModelNotFound, ModelRefused

MAX_HEADER_BYTES = 64 * 2**20
_FIRST_READ_BYTES = 2 * 2**20
_OTHERS = "localllm ls"  # what else is here; where this file came from, only its owner knows


def shown(text: str, limit: int = 80) -> str:
    """Return a name out of a file as printable ASCII, shortened, fit for a message."""
    printable = text[: limit + 1].encode("unicode_escape").decode("ascii")
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, without waiting on pipes or devices.

    Raises: ModelNotFound if nothing is there; ModelRefused for what is no readable file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelNotFound(f"{path} is not there.", "localllm ls") from None
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else str(error)
        raise ModelRefused(f"{path} cannot be opened: {reason}.", "localllm ls") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return FileIO(descriptor, "rb", closefd=True)
    os.close(descriptor)
    kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
    raise ModelRefused(f"{path} is {kind}, not a GGUF file.", "localllm ls")


class Source:
    """The beginning of a file as one growing buffer, bounded by the file and by MAX_HEADER_BYTES.

    Owns nothing: the caller closes the file. `buffer` grows in place, so what points into it
    points by offset.
    """

    def __init__(self, file: FileIO, name: str) -> None:
        self.name = name
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.end = min(self.file_bytes, MAX_HEADER_BYTES)
        self.buffer = bytearray()
        self._file = file
        self._fill(min(self.end, _FIRST_READ_BYTES))

    def need(self, end: int, field: str) -> None:
        """Make the buffer hold `end` bytes. Raises ModelRefused if the header cannot be that long."""
        if end <= len(self.buffer):
            return
        if end > self.file_bytes:
            what = f"ends at byte {end:,}, but the file has only {self.file_bytes:,}: cut short or corrupt"
            raise refusal(self.name, field, what)
        if end > self.end:
            raise refusal(self.name, field, f"makes the header larger than {MAX_HEADER_BYTES // 2**20} MB")
        self._fill(min(self.end, max(end, 2 * len(self.buffer))))
        if end > len(self.buffer):
            raise refusal(self.name, field, "cannot be read: the file became shorter meanwhile")

    def _fill(self, end: int) -> None:
        while len(self.buffer) < end:
            try:
                piece = self._file.read(end - len(self.buffer))
            except OSError as error:
                raise ModelRefused(f"{self.name} cannot be read: {error.strerror}.", "localllm ls") from None
            if not piece:
                return
            self.buffer += piece


def refusal(name: str, field: str, what: str, hint: str = _OTHERS) -> ModelRefused:
    """Return the refusal of a file: its name, the field at fault, and what is wrong with it."""
    return ModelRefused(f"{name}: {field} {what}.", hint, field=field)
