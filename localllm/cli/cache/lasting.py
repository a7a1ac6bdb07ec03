"""Whether what is warmed can be kept, asked before anything is computed; and why it was not, afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.tables import size
from localllm.errors import LocalLLMError, ModelRefused, UsageError, pasteable

if TYPE_CHECKING:
    from localllm.cli.options import CacheFlags
    from localllm.runtime.kv.explain import CacheStats
    from localllm.runtime.service import Service


def require_disk(model: str, flags: CacheFlags) -> None:
    """Have the hash of a model's file known that is about to be loaded here: what is computed lasts on disk alone.

    Raises: UsageError where the flags rule the disk out; ModelRefused for files without a hash; what `resolve` raises.
    """
    from localllm.cli.keeping import own_options
    from localllm.cli.signals import in_thread
    from localllm.models import hashes
    from localllm.models.resolve import resolve

    if own_options(flags).is_private:
        flag = "--private" if flags.private else "--kv-disk off"
        raise UsageError(
            f"What is computed here goes with this command, and {flag} keeps it off the disk: nothing would be left.",
            f"{pasteable('localllm', 'serve', model)} first, or leave the flag out",
        )
    found = resolve(model)
    if found.sha256 is not None:
        return
    if len(found.files) > 1:
        raise ModelRefused(
            f"{found.name} is in several files and was not pulled, so that it has no hash, and without one nothing "
            "of it goes to disk.",
            f"{pasteable('localllm', 'serve', model)} keeps it in its memory",
        )
    if not in_thread(lambda: hashes.learn(found.path)):
        raise _without_hash(found.path)


def require_folder(service: Service) -> None:
    """Raise LocalLLMError where the folder of the disk tier of a model that was loaded here is of no use."""
    stats = service.cache_stats()
    if stats.disk and stats.disk["failure"]:
        raise LocalLLMError(f"Nothing of this would be kept: {why_not_on_disk(stats)}.", "localllm doctor")


def why_not_in_ram(stats: CacheStats) -> str:
    """Return why RAM does not hold all of what was warmed."""
    return f"its share of RAM is {size(stats.ram_limit_bytes)} (--kv-ram)" if stats.ram_limit_bytes else "--kv-ram off"


def why_not_on_disk(stats: CacheStats) -> str:
    """Return why the disk does not hold all of what was warmed, though it might."""
    disk = stats.disk
    if disk is None:
        return "nothing of this model goes to disk (--kv-disk off, or its file was not hashed)"
    if disk["failure"]:
        return f"{disk['folder']} cannot be used: {disk['failure']}"
    if disk["n_failed"]:
        return f"{disk['folder']} did not take it"
    used, limit = size(int(disk["used_bytes"])), size(int(disk["limit_bytes"]))
    return f"there is no room for it in {disk['folder']}: {used} of {limit} are used (--kv-disk)"


def _without_hash(path: Path) -> ModelRefused:
    if os.stat(path).st_mtime > time.time():
        return ModelRefused(
            f"The time of {path} lies ahead, so that its hash is not relied on, and without one nothing goes to disk.",
            pasteable("touch", str(path)),
        )
    return ModelRefused(
        f"The hash of {path} cannot be remembered, because it is being written or the folder of hashes cannot be: "
        "without one nothing goes to disk.",
        "localllm doctor",
    )
