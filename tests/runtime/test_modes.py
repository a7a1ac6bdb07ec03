"""How a server shares the machine: modes and the shape of what it loads."""

from __future__ import annotations

import pytest

from localllm.errors import UsageError
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.modes import MODES, mode_of, served


def test_interactive_is_what_the_library_does() -> None:
    mode = mode_of("interactive")
    assert (mode.runtime, mode.nice, mode.threads(8)) == (RuntimeConfig(), 0, None)


def test_batch_lets_streams_wait_longer_for_more_tokens_in_all() -> None:
    batch, interactive = mode_of("batch"), mode_of("interactive")
    assert batch.runtime.itl_target_s > interactive.runtime.itl_target_s
    assert batch.runtime.min_chunk_tokens > interactive.runtime.min_chunk_tokens
    assert batch.threads(8) is None


@pytest.mark.parametrize(("n_default", "n_threads"), [(1, 1), (2, 1), (3, 1), (8, 4), (13, 6)])
def test_quiet_leaves_half_of_the_cores_and_the_rest_when_asked(n_default: int, n_threads: int) -> None:
    assert mode_of("quiet").threads(n_default) == n_threads
    assert mode_of("quiet").nice == max(mode.nice for mode in MODES.values())


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="turbo") as caught:
        mode_of("turbo")
    assert "interactive, batch, quiet" in caught.value.hint


@pytest.mark.parametrize(("parallel", "expected"), [(None, 8), (3, 3)])
def test_a_server_runs_several_and_retains_four(parallel: int | None, expected: int) -> None:
    config = served(LoadConfig(ctx=5, threads=2), parallel)
    assert (config.parallel, config.retained, config.ctx, config.threads) == (expected, 4, 5, 2)
