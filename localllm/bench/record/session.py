"""A recording from its first to its last moment: listen, pass on, write down, end on a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from localllm.bench.client.calls import Target
from localllm.bench.record.keeper import Keeper, TraceNotWritten
from localllm.bench.record.proxy import Proxy

_EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record. `url`: as it was given."""

    url: str
    target: Target
    file: Path
    keeps_text: bool = False


def record(recording: Recording, say: Callable[[str], None], on_kept: Callable[[int], None]) -> int:
    """Record until a signal comes; return the exit code (130, 143, 129). Main thread only.

    `say` hears the address, what is kept, and the count at the end; `on_kept` the count so far.
    Raises: UsageError (the file is there), TraceNotWritten where the file did not take it all.
    """
    keeper = Keeper(recording.file, keeps_text=recording.keeps_text, on_kept=on_kept)
    try:
        exit_code = asyncio.run(_run(recording, keeper, say))
    finally:
        keeper.close()
    say(_count(recording, keeper))
    if keeper.failure:
        raise TraceNotWritten(f"Not every request is in {recording.file}: {keeper.failure}.", "record again elsewhere")
    return exit_code


def _count(recording: Recording, keeper: Keeper) -> str:
    requests = f"{keeper.n_kept} request{'' if keeper.n_kept == 1 else 's'}"
    odd = f", {keeper.n_passed_over} passed on but no JSON" if keeper.n_passed_over else ""
    return f"{requests} recorded in {recording.file}{odd}"


async def _run(recording: Recording, keeper: Keeper, say: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(exit_code: int) -> None:
        if not stopped.done():
            stopped.set_result(exit_code)

    for number, exit_code in _EXIT_CODES.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # background jobs and nohup ignore them
            loop.add_signal_handler(number, stop, exit_code)
    proxy = Proxy(recording.target, keeper, say)
    await proxy.start()
    try:
        say(f"recording http://127.0.0.1:{proxy.port}/v1 -> {recording.url}")
        say(
            "prompts are written down as they are (--keep-text)"
            if recording.keeps_text
            else "texts become filler of the same length; answers are not kept"
        )
        return await stopped
    finally:
        await proxy.close()
