"""Asks the hub what a repository holds, through huggingface-hub, under the same network policy as the bytes."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from localllm.errors import DownloadFailed, LocalLLMError, ModelNotFound, UsageError
from localllm.models import filenames
from localllm.models.filenames import NamedSet
from localllm.models.reference import DEFAULT_QUANT, HubRef
from localllm.models.sources.download import RemoteFile
from localllm.models.sources.net import Policy
from localllm.models.sources.partial import Expected
from localllm.models.sources.transport import TRY_AGAIN, certificates, is_loopback, proxy_for

DEFAULT_ENDPOINT = "https://huggingface.co"
_TIMEOUT_S = 30.0
_TRIES = 4
_MAX_FILES = 100_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_TOKEN_HINT = "export HF_TOKEN=hf_your_token"


@dataclass(frozen=True, slots=True)
class HubSettings:
    """What the environment says about the hub. `named`: the user chose the endpoint."""

    endpoint: str
    named: bool
    token: str | None
    offline: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HubSettings:
        """Read HF_ENDPOINT, HF_TOKEN (or the saved login, for the hub itself only) and HF_HUB_OFFLINE."""
        endpoint = environment.get("HF_ENDPOINT", "").strip().rstrip("/")
        token = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
        implicit = endpoint in ("", DEFAULT_ENDPOINT) and not _is_true(environment, "HF_HUB_DISABLE_IMPLICIT_TOKEN")
        token = (token or (_saved_token(environment) if implicit else "")).strip()
        return cls(
            endpoint=endpoint or DEFAULT_ENDPOINT,
            named=bool(endpoint),
            token=token or None,
            offline=_is_true(environment, "HF_HUB_OFFLINE") or _is_true(environment, "TRANSFORMERS_OFFLINE"),
        )


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _saved_token(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    try:
        path = environment.get("HF_TOKEN_PATH") or os.path.join(home, "token")
        return Path(path).read_text(encoding="ascii")[:4096]
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class HubModel:
    """What the hub says of one model: the commit, the licence, the chosen files with their hashes."""

    commit: str
    license: str | None
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.expected.size_bytes for one in self.files)


def find(ref: HubRef, settings: HubSettings, policy: Policy, sleep: Callable[[float], None]) -> HubModel:
    """Return the files of `ref` at the commit that its revision means now.

    Raises ModelNotFound (no such repository, revision or quantisation; not allowed), UsageError (several
    models fit), DownloadFailed (the hub cannot be asked, or gives no hash).
    """
    import huggingface_hub
    from huggingface_hub import constants

    # Else it asks the hub which environment variables betray an AI agent, and reports the one it finds.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    huggingface_hub.set_client_factory(_client_factory(settings, policy))
    try:
        for attempt in range(_TRIES):
            try:
                info = _ask(ref, settings)
                break
            except _Again as error:
                if attempt == _TRIES - 1:
                    message = f"the hub at {settings.endpoint} cannot be asked for {ref.repo}: {error}"
                    raise DownloadFailed(message, "localllm doctor") from error
                sleep(0.5 * 2**attempt)
    finally:
        huggingface_hub.close_session()
    return _choose(ref, info, settings.endpoint)


class _Again(Exception):
    """The hub did not answer, or asked to wait."""


def _client_factory(settings: HubSettings, policy: Policy) -> Callable[[], Any]:
    """Return a factory of HTTP clients that check every request and redirect, and trust the user's authorities."""
    from huggingface_hub import errors

    # httpx or its successor, depending on the version: the library that its own errors come from.
    http_library: Any = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])

    def check(request: Any) -> None:
        url = str(request.url)
        policy.check(url, proxied=proxy_for(url) is not None)

    def make() -> Any:
        return http_library.Client(
            event_hooks={"request": [check]},
            follow_redirects=True,
            timeout=_TIMEOUT_S,
            verify=certificates(),
            trust_env=not is_loopback(urlsplit(settings.endpoint).hostname or ""),
        )

    return make


def _ask(ref: HubRef, settings: HubSettings) -> Any:
    """Return huggingface-hub's ModelInfo with sizes and hashes. Raises _Again, LocalLLMError."""
    import huggingface_hub
    from huggingface_hub import errors

    api = huggingface_hub.HfApi(endpoint=settings.endpoint, token=settings.token or False)
    try:
        return api.model_info(ref.repo, revision=ref.revision, files_metadata=True, timeout=_TIMEOUT_S)
    except errors.HFValidationError as error:
        raise UsageError(f"{ref.repo} cannot be a repository's name", "localllm pull hf:org/repository") from error
    except errors.HfHubHTTPError as error:
        told = _told(ref, settings, error)
        raise (told or _Again(f"it answered {error.response.status_code}")) from error
    except (errors.HTTPError, OSError) as error:
        raise _Again(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"the answer of {settings.endpoint} about {ref.repo} makes no sense ({type(error).__name__})"
        raise DownloadFailed(message, "check HF_ENDPOINT") from error


def _told(ref: HubRef, settings: HubSettings, error: Any) -> LocalLLMError | None:
    """Return what an HTTP error means for the user; None where it is worth another try."""
    from huggingface_hub import errors

    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        hint = f"accept it on {settings.endpoint}/{ref.repo}, then: {_TOKEN_HINT}"
        return ModelNotFound(f"{ref.repo} is gated: its licence must be accepted first", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{ref.repo} has no revision {ref.revision}", f"localllm pull hf:{ref.repo}")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        hint = f"check the spelling; for a private one: {_TOKEN_HINT}"
        return ModelNotFound(f"the hub has no repository {ref.repo}, or it is private", hint)
    if status in (401, 403):
        return ModelNotFound(f"the hub refuses {ref.repo} ({status})", _TOKEN_HINT)
    if status in TRY_AGAIN:
        return None
    return DownloadFailed(f"the hub answered {status} for {ref.repo}", "localllm doctor")


def _choose(ref: HubRef, info: Any, endpoint: str) -> HubModel:
    commit = str(info.sha or "")
    siblings = {one.rfilename: one for one in (info.siblings or [])[:_MAX_FILES]}
    if not _GIT_SHA1.fullmatch(commit) and not _SHA256.fullmatch(commit):
        raise DownloadFailed(f"the hub names no commit for {ref.repo}", "check HF_ENDPOINT")
    chosen = choose_set(ref, filenames.group(siblings))
    files = tuple(_remote(ref, name, siblings[name], commit, endpoint) for name in chosen.files)
    return HubModel(commit, _license_of(info), files)


def choose_set(ref: HubRef, sets: Sequence[NamedSet]) -> NamedSet:
    """Return the one set that the reference means.

    Raises ModelNotFound (with what there is instead, or what is missing), UsageError (several fit).
    """
    if not sets:
        raise ModelNotFound(f"{ref.repo} holds no GGUF file", f"localllm pull hf:{ref.repo}-GGUF")
    fitting = filenames.choose_quant(sets, ref.quant or DEFAULT_QUANT)
    if not fitting and ref.quant is None and len(sets) == 1:
        fitting = list(sets)
    if not fitting:
        there = sorted({filenames.quant_of(one.stem) or one.stem for one in sets})
        raise ModelNotFound(
            f"{ref.repo} has no {ref.quant or DEFAULT_QUANT}; it has: {', '.join(there)}",
            f"localllm pull {HubRef(ref.repo, ref.revision, there[0])}",
        )
    if len(fitting) > 1:
        names = ", ".join(one.stem for one in fitting)
        one = HubRef(ref.repo, ref.revision, fitting[0].stem.rsplit("/", 1)[-1])
        raise UsageError(f"{ref} fits several models of the repository: {names}", f"localllm pull {one}")
    if fitting[0].missing:
        lacking = ", ".join(fitting[0].missing[:5])
        raise ModelNotFound(f"{ref.repo} lacks parts of the set: {lacking}", f"localllm pull hf:{ref.repo}:Q8_0")
    return fitting[0]


def _remote(ref: HubRef, path: str, sibling: Any, commit: str, endpoint: str) -> RemoteFile:
    name = path.rsplit("/", 1)[-1]
    lfs = sibling.lfs
    sha256 = str(getattr(lfs, "sha256", "") or "") if lfs else ""
    git_sha1 = str(sibling.blob_id or "")
    size = sibling.size if not lfs or getattr(lfs, "size", None) is None else lfs.size
    known = _SHA256.fullmatch(sha256) or (not lfs and _GIT_SHA1.fullmatch(git_sha1))
    if type(size) is not int or size <= 0 or not known:
        raise DownloadFailed(
            f"the hub gives no size and hash for {name}, so it cannot be checked", "try another mirror"
        )
    if name.startswith(".") or any(character < " " or character in "\\:" for character in name) or len(name) > 200:
        raise DownloadFailed(f"the hub has a file with a name that is not safe: {name!r}", "localllm doctor")
    url = f"{endpoint}/{ref.repo}/resolve/{commit}/{quote(path)}"
    expected = Expected(size, sha256=sha256) if sha256 else Expected(size, git_sha1=git_sha1)
    return RemoteFile(url, name, expected, commit)


def _license_of(info: Any) -> str | None:
    tags = [tag for tag in (info.tags or []) if isinstance(tag, str) and tag.startswith("license:")]
    card = info.card_data.get("license") if info.card_data else None
    return card if isinstance(card, str) else (tags[0].removeprefix("license:") if tags else None)
