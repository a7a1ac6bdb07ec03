"""From flags to where KV is kept: sizes from the machine where nobody says, and the folder on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.units import check_days, parse_size, size_or_auto
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.options import CacheFlags
    from localllm.runtime.config import TierConfig
    from localllm.runtime.kv.disk_folder import Trouble
    from localllm.runtime.types import GenerationOptions

_DAY_S = 86_400.0
_FOLDER_S = 2.0  # that a command waits for the folder of the disk tier
_MOMENT_S = 1.0  # that `run` and `chat` wait at their end for what is being written


def default_folder() -> Path:
    """Return where the disk tier lies: LOCALLLM_KV_DIR, else below LOCALLLM_HOME, else in the user's cache folder."""
    from localllm.models.store import default_home

    named = os.environ.get("LOCALLLM_KV_DIR", "")
    if named:
        return Path(os.path.abspath(os.path.expanduser(named)))
    if os.environ.get("LOCALLLM_HOME"):
        return default_home() / "kv"
    from platformdirs import user_cache_path

    folder = Path(user_cache_path("localllm"))
    if str(folder).startswith("~"):
        raise UsageError("No home folder is known, so there is no place for the cache.", "--kv-disk off")
    return folder.absolute() / "kv"


def tier_config(flags: CacheFlags, *, flush_s: float = _MOMENT_S, keeps_all: bool = False) -> TierConfig:
    """Return where KV is kept. Raises UsageError naming the flag whose value makes no sense."""
    from localllm.runtime.config import TierConfig

    ram_bytes = size_or_auto("--kv-ram", flags.kv_ram)
    disk_bytes = size_or_auto("--kv-disk", flags.kv_disk)
    check_days("--kv-disk-age", flags.kv_disk_age)
    daily_bytes = parse_size("--kv-disk-daily", flags.kv_disk_daily)
    folder = "" if own_options(flags).is_private else str(default_folder())
    return TierConfig(
        ram_bytes=ram_bytes,
        disk_dir=folder,
        disk_bytes=disk_bytes if folder else 0,
        disk_daily_bytes=daily_bytes,
        disk_age_s=flags.kv_disk_age * _DAY_S,
        flush_s=flush_s,
        keeps_all=keeps_all,
    )


def own_options(flags: CacheFlags) -> GenerationOptions:
    """Return what the flags say of each request, to which its own options are added.

    A request may go through a server, whose flags were others: this holds there too. Raises as `tier_config`.
    """
    from localllm.runtime.types import GenerationOptions

    return GenerationOptions(is_private=flags.private or size_or_auto("--kv-disk", flags.kv_disk) == 0)


def tell_once(config: TierConfig, say: Callable[[str], None]) -> None:
    """Say that there is a disk tier, the first time that something may lie there; never where it cannot be used."""
    if not config.disk_dir or not _is_first(Path(config.disk_dir)):
        return
    limit = "a tenth of the free disk" if config.disk_bytes is None else f"{config.disk_bytes / 1e9:.1f} GB"
    say(
        f"what long prompts compute is kept in {config.disk_dir}, at most {limit} "
        "(localllm cache; --private or --kv-disk off keeps nothing there)"
    )


def kept_bytes(folder: Path) -> tuple[int, int]:
    """Return how many blocks lie in the folder of the disk tier, and their bytes."""
    from localllm.runtime.kv.disk_list import total

    found = total(folder)
    return found["n_blocks"], found["bytes"]


def folder_trouble(folder: Path) -> Trouble | None:
    """Return what is wrong with the folder of the disk tier, and the next step; None where it can be used."""
    from localllm.runtime.kv.disk_folder import trouble_with

    return trouble_with(folder)


def has_blocks(config: TierConfig) -> bool:
    """Say whether something lies in the folder of the disk tier, as far as that answers."""
    from localllm.runtime.kv.asking import ask_once
    from localllm.runtime.kv.disk_room import survey

    with contextlib.suppress(TimeoutError):
        return bool(config.disk_dir) and ask_once(lambda: any(True for _ in survey(Path(config.disk_dir))), _FOLDER_S)
    return False


def _is_first(folder: Path) -> bool:
    """Take note that a folder is told of; False = that was done before, or it is not one that can be used."""
    from localllm.runtime.kv.asking import ask_once
    from localllm.runtime.kv.disk_secret import make_folder

    def mark() -> None:
        make_folder(folder)
        os.close(os.open(folder / "told", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    try:
        ask_once(mark, _FOLDER_S)
    except OSError:  # it is there, or does not answer, or the tier is off for the same reason, and says so
        return False
    return True
