"""The arrows between folders point down only, and start-up loads no engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import PROJECT

PACKAGE = PROJECT / "localllm"

# What each part of the package may import of the package. A part is the first name below
# `localllm`; the two backends' folders are told apart further down.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "models": {"errors"},
    "runtime": {"errors", "models"},
    "backends": {"errors", "models", "runtime"},
    "compose": {"errors", "models", "runtime", "backends"},
    "worker": {"__init__", "errors", "models", "runtime", "compose"},
    "bench": {"__init__", "errors", "models", "runtime", "backends", "compose", "worker"},
    "server": {"__init__", "errors", "models", "runtime", "worker"},
    "cli": {"__init__", "errors", "models", "runtime", "backends", "compose", "worker", "bench", "server"},
    "__init__": {"errors", "models", "runtime", "compose"},
    "__main__": {"cli"},
}

# The seam that stands in `runtime` for backends to implement: facts and values, no machinery.
SEAM = {"localllm.runtime.engine", "localllm.runtime.types", "localllm.runtime.config"}

# The folders of the benchmark, from the ground up: each imports of the others only what stands before it.
BENCH = (
    *("measures", "stats", "slo", "workloads", "client", "machine", "engine", "goldens", "record"),
    *("serving", "reports", "compare", "contract", "history"),
)

# Third-party modules that only one folder (or these) may name.
ONLY_IN: dict[str, str | tuple[str, ...]] = {
    "llama_cpp": "backends/llamacpp/",
    "mlx": "backends/mlx/",
    "mlx_lm": "backends/mlx/",
    "typer": "cli/",
    "rich": "cli/",
    "prompt_toolkit": "cli/",
    "huggingface_hub": "models/sources/",
    "starlette": "server/",
    "uvicorn": "server/",
    "h11": ("server/", "bench/"),
}


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@cache
def imported(module: str, *, at_import_only: bool = False) -> frozenset[str]:
    """Return the dotted names that a module imports: all of them, or those that run when it is imported."""
    return frozenset(_imported(module, at_import_only))


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def _imported(module: str, at_import_only: bool) -> Iterator[str]:

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if at_import_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if at_import_only and is_type_checking(child):
                continue
            yield child
            yield from walk(child)

    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def ours(names: Iterable[str]) -> set[str]:
    return {name for name in names if name == "localllm" or name.startswith("localllm.")}


def test_every_part_is_known() -> None:
    assert {part_of(module) for module in MODULES} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    part = part_of(module)
    allowed = MAY_IMPORT[part] | ({part} if part != "__init__" else set())
    wrong = {name for name in ours(imported(module)) if part_of(name) not in allowed}
    assert not wrong, f"{module} imports {sorted(wrong)}, which does not stand below it"


def test_the_benchmark_points_down_too() -> None:
    for module in MODULES:
        if not module.startswith("localllm.bench."):
            continue
        folders = {name.split(".")[2] for name in ours(imported(module)) if name.startswith("localllm.bench.")}
        own = module.split(".")[2]
        above = folders - {own} - set(BENCH[: BENCH.index(own)])
        assert not above, f"{module} imports {sorted(above)}, which stand above it"


def test_backends_see_only_the_seam_of_the_runtime() -> None:
    for module in MODULES:
        if part_of(module) == "backends":
            of_runtime = {name for name in ours(imported(module)) if part_of(name) == "runtime"}
            assert of_runtime <= SEAM, f"{module} imports more of the runtime than its seam"


def test_backends_never_import_each_other() -> None:
    # What cpu, cuda and metal share stands in llamacpp; registry and placement stand above all of them.
    for module in MODULES:
        parts = module.split(".")
        if part_of(module) != "backends" or len(parts) < 4:
            continue
        folders = {
            name.split(".")[2]
            for name in ours(imported(module))
            if name.startswith("localllm.backends.") and len(name.split(".")) > 3
        }
        shared = {"llamacpp"} if parts[2] in ("cpu", "cuda", "metal") else set()
        assert folders <= {parts[2]} | shared, f"{module} imports another backend"


def test_only_compose_wires_runtime_to_backends() -> None:
    for module in MODULES:
        if part_of(module) in ("backends", "compose"):
            continue
        names = ours(imported(module))
        both = {"runtime", "backends"} <= {part_of(name) for name in names}
        assert not both, f"{module} imports both runtime and backends: that is compose's work"


@pytest.mark.parametrize(("library", "folder"), ONLY_IN.items())
def test_a_library_is_named_in_its_folders(library: str, folder: str | tuple[str, ...]) -> None:
    for module, path in MODULES.items():
        if path.relative_to(PACKAGE).as_posix().startswith(folder):
            continue
        names = set(imported(module))
        assert not {n for n in names if n == library or n.startswith(library + ".")}, f"{module} imports {library}"


def test_llama_cpp_comes_in_through_bindings_alone() -> None:
    # By import statement, or by its name as a text that something imports.
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named = {name.split(".")[0] for name in {*imported(module), *texts}}
        assert "llama_cpp" not in named or module == "localllm.backends.llamacpp.bindings", module


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: ours(imported(module, at_import_only=True)) & MODULES.keys() - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "a circle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_only_the_worker_process_reaches_compose() -> None:
    for module in MODULES:
        if part_of(module) == "worker" and module != "localllm.worker.main":
            assert "compose" not in {part_of(name) for name in ours(imported(module))}, module


HEAVY = {
    *("llama_cpp", "numpy", "jinja2", "huggingface_hub", "rich", "msgspec", "requests", "httpx2", "prompt_toolkit"),
    *("starlette", "uvicorn", "asyncio"),
}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls"], ["run", "--help"]])
def test_start_up_loads_no_engine(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from localllm.cli import main\n"
        "from localllm.cli.app import run_command\n"
        f"run_command({arguments!r}, main.VERBS, main.GROUPS)\n"
        "print('loaded:', *sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert "localllm" in loaded, done.stderr
    assert not loaded & HEAVY
