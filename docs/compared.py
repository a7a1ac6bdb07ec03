"""The comparisons of servers on docs/benchmarks.md, as `localllm bench run` found them by docs/contracts/*.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from localllm.errors import RuleFailed

FOLDER = Path(__file__).resolve().parent
CONTRACTS = ("servers", "kept")
MARK = "<!-- what follows: localllm bench run docs/contracts/servers.toml -->"

HEAD = """Measured by `localllm bench run` as [the contract](contracts/{name}.toml) says, which was written before:
servers of the same native version, one at a time, in turning order, each at its defaults and at the flags named
*best*. [bench.md](bench.md) tells what the numbers mean."""


def measure(peers: Path | None, names: Sequence[str] = CONTRACTS) -> int:
    """Measure contracts with the servers on PATH and those that peers.sh built in `peers`; return the worst exit code.

    The reports are kept, the JSON with every request's times is not: it is megabytes.
    """
    folders = [str(Path(sys.executable).parent), *([str(peers / "build" / "bin")] if peers else [])]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    return max(_measure(name, {**os.environ, "PATH": path}) for name in names)


def _measure(name: str, environment: Mapping[str, str]) -> int:
    contract = FOLDER / "contracts" / f"{name}.toml"
    with tempfile.TemporaryDirectory(prefix="localllm-docs-") as folder:
        command = [sys.executable, "-m", "localllm", "bench", "run", str(contract), "-o", f"{folder}/{name}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode in (0, RuleFailed.exit_code):
            shutil.copy(Path(folder, f"{name}.md"), _report(name))
            return 0
    return done.returncode


def section() -> str:
    """Return the part of the page, each report a level below its title; "" where nothing was measured."""
    parts = [part for name in CONTRACTS if (part := _part(name, _report(name)))]
    return "\n\n".join([MARK, *parts]) + "\n" if parts else ""


def _report(name: str) -> Path:
    return FOLDER / "measured" / f"{name}.md"


def _part(name: str, report: Path) -> str:
    if not report.is_file():
        return ""
    below = re.sub(r"^(#+ )", r"#\1", report.read_text(encoding="utf-8"), flags=re.MULTILINE)
    title, _, rest = below.partition("\n")
    return f"{title}\n\n{HEAD.format(name=name)}\n{rest.rstrip()}"
