"""A server that answers so many requests and then dies: `python -m tests.bench.serving.mortal N` prints its address."""

from __future__ import annotations

import os
import sys
import threading

from tests.bench.client.stand_in import Reply, Seen
from tests.bench.serving.rival import Rival, served


def main(n_requests: int) -> None:
    """Serve until the n-th request; end in the middle of its answer, as a killed process does."""

    async def die(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) >= n_requests:
            await reply.begin_stream()
            await reply.text("half")
            os._exit(1)
        return False

    with served(Rival(fault=die)) as url:
        print(url, flush=True)
        threading.Event().wait(120)


if __name__ == "__main__":
    main(int(sys.argv[1]))
