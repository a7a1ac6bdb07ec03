"""How a server is started: its command and environment, with places for the port and the model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

READY_TIMEOUT_S = 600.0
PLACEHOLDERS = ("port", "model")
OURS = "localllm"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Starting:
    """How a server is started.

    `command`: words; "localllm" as the first is this program. `variables` are set in its
    environment, which is `environment` else (None = ours as it is then). In both {port} and {model}
    stand for its port and the model (a path or a name). `port` 0: a free one at each start.
    `serves`: which of its models is meant, where it lists several. `folder`: where it runs. `key`:
    the bearer key it asks for.
    """

    name: str
    command: tuple[str, ...]
    model: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    port: int = 0
    serves: str = ""
    folder: Path | None = None
    key: str | None = None
    ready_timeout_s: float = READY_TIMEOUT_S

    @property
    def is_ours(self) -> bool:
        """Whether it is this program that serves."""
        return self.command[0] == OURS

    def words(self, port: int) -> list[str]:
        """Return the command line for a port."""
        words = [self._filled(word, port) for word in self.command]
        return [sys.executable, "-m", OURS, *words[1:]] if self.is_ours else words

    def whole_environment(self, port: int) -> dict[str, str]:
        """Return the environment for a port."""
        ours = os.environ if self.environment is None else self.environment
        return {**ours, **{name: self._filled(value, port) for name, value in self.variables.items()}}

    def _filled(self, text: str, port: int) -> str:
        known = {"port": str(port), "model": self.model}
        return _PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), text)


def placeholders(words: Sequence[str]) -> list[str]:
    """Return the names in braces in a command, known ones or not."""
    return [name for word in words for name in _PLACEHOLDER.findall(word)]


def is_secret(variable: str) -> bool:
    """Say whether a variable's name says that its value is not to be shown."""
    return _SECRET.search(variable) is not None
