"""The comparison of servers on docs/benchmarks.md, as `localllm bench run docs/contracts/servers.toml` found it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from localllm.errors import RuleFailed

FOLDER = Path(__file__).resolve().parent
CONTRACT = FOLDER / "contracts" / "servers.toml"
RESULT = FOLDER / "measured" / "servers.md"
MARK = "<!-- what follows: localllm bench run docs/contracts/servers.toml -->"

HEAD = """Measured by `localllm bench run` as [the contract](contracts/servers.toml) says, which was written before:
servers of the same native version, one at a time, in turning order, each at its defaults and at the flags named
*best*. [bench.md](bench.md) tells what the numbers mean."""


def measure(peers: Path | None) -> int:
    """Measure the contract with the servers on PATH and those that peers.sh built in `peers`; return the exit code.

    The report is kept, the JSON with every request's times is not: it is megabytes.
    """
    folders = [str(Path(sys.executable).parent), *([str(peers / "build" / "bin")] if peers else [])]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="localllm-docs-") as folder:
        command = [sys.executable, "-m", "localllm", "bench", "run", str(CONTRACT), "-o", f"{folder}/servers"]
        done = subprocess.run(command, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL, check=False)
        if done.returncode in (0, RuleFailed.exit_code):
            shutil.copy(Path(folder, "servers.md"), RESULT)
    return done.returncode


def section(result: Path = RESULT) -> str:
    """Return the part of the page, a level below its title; "" where nothing was measured."""
    if not result.is_file():
        return ""
    below = re.sub(r"^(#+ )", r"#\1", result.read_text(encoding="utf-8"), flags=re.MULTILINE)
    title, _, rest = below.partition("\n")
    return f"{MARK}\n\n{title}\n\n{HEAD}\n{rest.rstrip()}\n"
