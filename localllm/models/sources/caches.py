"""Models that other tools already fetched: read where they are, never copied, never written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.models import filenames
from localllm.models.disk import files

MAX_FOLDERS = 20_000
MAX_MANIFEST_BYTES = 4 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]{64}")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_UNFINISHED = (".incomplete", ".part", ".partial", ".downloadInProgress", ".tmp")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in another tool's folder. `source` names the tool; `sha256` only where the folder tells it."""

    name: str
    path: Path
    files: tuple[Path, ...]
    size_bytes: int
    source: str
    quant: str | None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder of another tool that exists here."""

    tool: str
    path: Path
    read: Callable[[Path], Iterator[CachedModel]]


def folders(environment: Mapping[str, str] | None = None) -> list[CacheFolder]:
    """Return the caches that exist on this machine (for `doctor`, and to search them)."""
    env = os.environ if environment is None else environment
    home = os.path.expanduser("~")
    cache = env.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    hub = hub or os.path.join(env.get("HF_HOME") or os.path.join(cache, "huggingface"), "hub")
    mac = sys.platform == "darwin"
    llama = os.path.join(home, "Library", "Caches", "llama.cpp") if mac else os.path.join(cache, "llama.cpp")
    candidates = [
        CacheFolder("Hugging Face", Path(hub), read_hub),
        CacheFolder("llama.cpp", Path(env.get("LLAMA_CACHE") or llama), read_llama_cpp),
        CacheFolder("LM Studio", Path(home, ".lmstudio", "models"), read_lm_studio),
        CacheFolder("LM Studio", Path(cache, "lm-studio", "models"), read_lm_studio),
        CacheFolder("Ollama", Path(env.get("OLLAMA_MODELS") or os.path.join(home, ".ollama", "models")), read_ollama),
        CacheFolder("Ollama", Path("/usr/share/ollama/.ollama/models"), read_ollama),
    ]
    return [one for one in candidates if os.path.isdir(one.path)]


def find_all(environment: Mapping[str, str] | None = None) -> list[CachedModel]:
    """Return every model of every cache, by name. Never raises: what cannot be read is skipped."""
    found: dict[Path, CachedModel] = {}
    for folder in folders(environment):
        for model in _careful(folder.read(folder.path)):
            found.setdefault(Path(os.path.realpath(model.path)), model)
    return sorted(found.values(), key=lambda model: (filenames.folded(model.name), str(model.path)))


def _careful(models: Iterator[CachedModel]) -> Iterator[CachedModel]:
    """Yield until the folder makes trouble."""
    try:
        yield from models
    except (OSError, ValueError, RecursionError):
        return


def read_hub(root: Path) -> Iterator[CachedModel]:
    """Yield the GGUF models of a hub cache: models--ORG--REPO/snapshots/COMMIT/FILE, links into blobs."""
    for repo in _subfolders(root):
        match = re.fullmatch(r"models--(.+?)--(.+)", repo.name)
        if match is None:
            continue
        main = _read_text(repo / "refs" / "main")
        snapshots = sorted(_subfolders(repo / "snapshots"), key=lambda path: (path.name != main, path.name))
        seen: set[str] = set()
        for snapshot in snapshots:
            for model in _models_below(snapshot, f"{match[1]}/{match[2]}", "Hugging Face cache"):
                if model.name not in seen:
                    seen.add(model.name)
                    yield model


def read_llama_cpp(root: Path) -> Iterator[CachedModel]:
    """Yield what llama.cpp fetched: flat ORG_REPO_FILE.gguf, or (newer) the layout of the hub."""
    yield from read_hub(root)
    yield from _models_in(root, "", "llama.cpp cache")


def read_lm_studio(root: Path) -> Iterator[CachedModel]:
    """Yield LM Studio's models: ORG/REPO/FILE.gguf."""
    for org in _subfolders(root):
        for repo in _subfolders(org):
            yield from _models_below(repo, f"{org.name}/{repo.name}", "LM Studio")


def read_ollama(root: Path) -> Iterator[CachedModel]:
    """Yield Ollama's models as `ollama:NAME:TAG`: manifests/HOST/NAMESPACE/MODEL/TAG name blobs by digest."""
    manifests = root / "manifests"
    for folder in _walk(manifests):
        parts = folder.relative_to(manifests).parts
        if len(parts) != 3:
            continue
        for tag in _names(folder):
            model = _ollama_model(root, folder / tag, _ollama_name(parts[0], parts[1], parts[2], tag))
            if model is not None:
                yield model


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    shown = [model] if namespace == "library" else [namespace, model]
    if host != "registry.ollama.ai":
        shown.insert(0, host)
        shown[1:2] = [namespace] if namespace == "library" else shown[1:2]
    return f"ollama:{'/'.join(shown)}:{tag}"


def _ollama_model(root: Path, manifest: Path, name: str) -> CachedModel | None:
    try:
        layers = json.loads(files.read_bounded(manifest, MAX_MANIFEST_BYTES))["layers"]
        digests = [_DIGEST.fullmatch(one["digest"]) for one in layers if one["mediaType"] == _OLLAMA_MODEL]
        if len(digests) != 1 or digests[0] is None:
            return None
        blob = root / "blobs" / f"sha256-{digests[0][1]}"
        with open(blob, "rb") as file:
            if file.read(4) != b"GGUF":
                return None
        size = os.stat(blob).st_size
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CachedModel(name, blob, (blob,), size, "Ollama", filenames.quant_of(manifest.name), digests[0][1])


def _models_below(folder: Path, repo: str, source: str) -> Iterator[CachedModel]:
    for sub in _walk(folder):
        yield from _models_in(sub, repo, source)


def _models_in(folder: Path, repo: str, source: str) -> Iterator[CachedModel]:
    """Yield the whole models among the files of one folder."""
    for one in filenames.group(_names(folder)):
        if one.missing:
            continue
        paths = tuple(folder / name for name in one.files)
        quant = filenames.quant_of(one.stem)
        name = f"{repo}:{quant or one.stem}" if repo else one.stem
        size = sum(os.stat(path).st_size for path in paths)
        yield CachedModel(name, paths[0], paths, size, source, quant, _blob_hash(paths))


def _blob_hash(paths: tuple[Path, ...]) -> str | None:
    """Return the hash that a hub cache names its blob by, for a model of one file."""
    if len(paths) != 1 or not paths[0].is_symlink():
        return None
    name = os.path.basename(os.path.realpath(paths[0]))
    return name if _HEX.fullmatch(name) else None


def _names(folder: Path) -> list[str]:
    """Return the files of a folder, links to files included; [] where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if os.path.isfile(entry.path)]
    except OSError:
        return []
    return [name for name in names if not name.endswith(_UNFINISHED) and not name.startswith(".")]


def _subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, links not followed; [] where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _walk(folder: Path) -> Iterator[Path]:
    """Yield a folder and those below it, links not followed, at most MAX_FOLDERS and 6 deep."""
    waiting, seen = [(folder, 0)], 0
    while waiting and seen < MAX_FOLDERS:
        current, depth = waiting.pop()
        seen += 1
        yield current
        if depth < 6:
            waiting.extend((sub, depth + 1) for sub in reversed(_subfolders(current)))


def _read_text(path: Path) -> str:
    try:
        return files.read_bounded(path, 1024).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
