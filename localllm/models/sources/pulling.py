"""What every pull does around its source: one owner, resume, facts from the header, one switch at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from localllm.errors import ModelRefused
from localllm.models import filenames, provenance
from localllm.models.disk.lock import Owner
from localllm.models.provenance import Provenance, StoredFile
from localllm.models.sources.download import told_as_disk_trouble
from localllm.models.sources.progress import Meter, OnProgress, Phase
from localllm.models.store import Store, StoredModel


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a source put into the staging folder, checked, in the order of a split set."""

    files: tuple[StoredFile, ...]
    source: str
    revision: str | None
    license: str | None
    quantiser: str | None = None


class Source(Protocol):
    """Somewhere that models come from. `name` is what the model is called in the store."""

    @property
    def name(self) -> str: ...

    def holds(self, stored: StoredModel) -> bool:
        """Tell whether `stored` is what this source would fetch now. May use the network."""
        ...

    def fill(self, staging: Path, meter: Meter) -> Fetched:
        """Put the checked files into `staging`, using what an earlier try left there.

        Raises: ModelNotFound, DownloadFailed, HashMismatch, ModelRefused.
        """
        ...


def run(source: Source, store: Store, on_progress: OnProgress | None) -> StoredModel:
    """Pull from `source` into `store` and return the model."""
    meter = Meter(on_progress)
    meter.start(Phase.FINDING, source.name)

    def waiting(owner: Owner) -> None:
        meter.say(Phase.WAITING, f"{owner} is pulling {source.name}")

    with told_as_disk_trouble(store.home, source.name), store.locked(source.name, waiting):
        stored = store.get(source.name)
        if stored is not None and not stored.problem and stored.sha256 and source.holds(stored):
            return stored
        staging = store.staging(source.name)
        fetched = source.fill(staging, meter)
        facts = describe(source.name, staging, fetched)
        for one in fetched.files:
            (staging / one.name).chmod(0o444)
        return store.publish(staging, facts)


def describe(name: str, staging: Path, fetched: Fetched) -> Provenance:
    """Return the facts of a pull: the source's, completed from the header of the first file.

    Raises ModelRefused where that file is no GGUF that can be read.
    """
    from localllm.models.gguf import read_header

    first = fetched.files[0].name
    try:
        metadata = read_header(staging / first).metadata
    except ModelRefused as error:
        raise ModelRefused(f"{name} was fetched, but {error.message}", f"localllm rm {name}") from error

    def text(key: str) -> str | None:
        value = metadata.get(key)
        return value if isinstance(value, str) and value else None

    return Provenance(
        name=name,
        source=fetched.source,
        revision=fetched.revision,
        license=fetched.license or text("general.license"),
        quant=filenames.quant_of(first),
        quantiser=text("general.quantized_by") or fetched.quantiser,
        imatrix=text("quantize.imatrix.dataset") or text("quantize.imatrix.file"),
        pulled_at=provenance.now(),
        files=fetched.files,
    )
