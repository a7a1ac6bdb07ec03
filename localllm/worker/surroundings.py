"""What a model needs of its supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.runtime.config import RuntimeConfig
from localllm.worker.handle import StartProcess
from localllm.worker.lifecycle import SupervisorSettings

if TYPE_CHECKING:
    from localllm.worker.unit import ModelUnit


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The settings that all models share, and what only their supervisor can do.

    `key`: for fingerprints. `make_room`: unloads others where the model needs it; returns its runtime's settings.
    `evict_one`: unloads the model that is missed least, and says whether there was one. `noticed`: called
    whenever it is used or changes its state. `turn`: held by who loads a model that did not run before, so
    that each sees the memory which is really left.
    """

    settings: SupervisorSettings
    key: bytes
    log: Callable[[str, str], None]
    start: StartProcess
    make_room: Callable[[ModelUnit], Awaitable[RuntimeConfig]]
    evict_one: Callable[[ModelUnit], Awaitable[bool]]
    noticed: Callable[[], None]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
