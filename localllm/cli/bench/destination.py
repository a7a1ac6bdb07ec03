"""The file that a result goes to: found unusable before anything is measured, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from localllm.cli.bench.options import ReportForm
from localllm.errors import LocalLLMError, UsageError

_FORMS: dict[str, ReportForm] = {".md": "md", ".html": "html", ".htm": "html"}


class Destination:
    """A file to write once. Raises UsageError where that cannot be done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.form: ReportForm = _FORMS.get(path.suffix.lower(), "json")
        # What is no plain file (/dev/stdout, a pipe) is written to, not replaced; what a link names is replaced.
        self._is_plain = not path.exists() or path.is_file()
        self._place = path.resolve() if self._is_plain else path
        if path.is_dir():
            raise UsageError(f"-o {path} is a folder.", f"-o {path / 'result.json'}")
        if self._is_plain:
            self._check_folder()

    def _check_folder(self) -> None:
        folder = self._place.parent
        if not folder.is_dir():
            raise UsageError(f"There is no folder {folder}.", f"mkdir -p {folder}")
        try:
            descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
        except OSError as error:
            raise UsageError(f"Nothing can be written in {folder}: {error.strerror}.", "-o FILE elsewhere") from None
        os.close(descriptor)
        os.unlink(name)

    def write(self, text: str) -> None:
        """Write the file. Raises LocalLLMError; what stood there before stands there still then."""
        try:
            if self._is_plain:
                self._replace(text.encode())
            else:
                self.path.write_bytes(text.encode())
        except OSError as error:
            raise LocalLLMError(f"Cannot write {self.path}: {error.strerror}.", "-o FILE elsewhere") from None

    def _replace(self, data: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._place.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, self._place.stat().st_mode & 0o7777 if self._place.exists() else 0o666 & ~_umask())
            os.replace(name, self._place)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
