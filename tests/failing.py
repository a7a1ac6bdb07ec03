"""Makes one file operation of many fail, so that a test can try each in turn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


class FailingCalls:
    """Counts the calls of some functions of `os`; the one numbered `fail_at` (from 1) raises an I/O error."""

    def __init__(self) -> None:
        self.n_calls = 0
        self._fail_at = 0

    @contextmanager
    def at(self, fail_at: int, *names: str) -> Iterator[None]:
        """Let the call numbered `fail_at` among these functions fail while inside."""
        self.n_calls, self._fail_at = 0, fail_at
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self._counted(getattr(os, name)))
            yield

    def _counted(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.n_calls += 1
            if self.n_calls == self._fail_at:
                raise OSError(errno.EIO, "injected")
            return real(*args, **kwargs)

        return call
