"""Where prompts part: what was computed lately, also once nothing of it is held.

Where prefixes cannot be cut, only a checkpoint at the very token where the next prompt leaves an earlier one
serves it: a document with another question each time needs one at the document's end, which no message ends at.
"""

from __future__ import annotations

from collections.abc import Hashable

from localllm.runtime.kv.prefix_cache import PrefixCache
from localllm.runtime.types import Tokens

_MOST_TOKENS = 1 << 18  # of all prompts together; ids alone, a few bytes each


class Forks:
    """The newest prompts, for finding how much of another is theirs. Used by the engine's thread alone."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._prompts = PrefixCache()
        self._sizes: dict[int, int] = {}  # by number, the oldest first
        self._n_tokens = self._n_prompts = 0

    def find(self, root: Hashable, tokens: Tokens) -> int:
        """Return how many leading tokens a prompt has in common with an earlier one."""
        hits = self._prompts.match(root, tokens)
        return hits[0].n_common if hits else 0

    def add(self, root: Hashable, tokens: Tokens) -> None:
        """Remember a prompt, instead of the oldest."""
        self._n_prompts += 1
        self._prompts.insert(root, self._n_prompts, tokens)
        self._sizes[self._n_prompts] = len(tokens)
        self._n_tokens += len(tokens)
        while self._n_tokens > _MOST_TOKENS:
            oldest = next(iter(self._sizes))
            self._prompts.remove(oldest)
            self._n_tokens -= self._sizes.pop(oldest)
