"""The architecture as a table, checked by parsing every import, lazy and type-checking ones included.

A file of d3d_sglang imports only from layers below its own. A new file has to be entered here: the moment to
think about where it belongs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "d3d_sglang"
MAX_LINES = 400
VAGUE_NAMES = {"utils", "helpers", "util", "helper", "common", "misc"}

# Module of d3d_sglang -> layer. "name.*" is a package whose files may import each other.
LAYERS = {
    "options": 0,
    "drafter_config": 0,
    "spec_types": 0,
    "metrics": 0,
    "coins": 0,
    "drafter.page_pool": 0,
    "layout": 1,
    "drafter.vocabulary": 1,
    "drafter.weight_files": 1,
    "drafter.kv_cache": 1,
    "verify.accept": 1,
    "verify.penalties": 1,
    "verify.sampling": 1,
    "branch.planner": 1,
    "branch.selector": 1,
    "proposals": 1,
    "cpu_engine.*": 1,
    "masks": 2,
    "drafter.mask_token": 2,
    "drafter.checkpoint": 3,
    "drafter.attention": 3,
    "drafter.export": 4,
    "drafter.initialise": 5,
    "drafter.model": 4,
    "drafter.executor": 5,
    "reference": 5,
    "drafter.rows": 6,
    "drafting": 7,
    "integration.*": 8,
    "worker": 9,
    "plugin": 10,
    "cli.*": 11,
}
# SGLang builds the worker through a factory, which has to import it when it is called, and not before.
UPWARD_BY_DESIGN = {("integration.algorithm", "worker")}
# These meet in spec_types only.
APART = ("drafter", "branch", "verify")
MAY_IMPORT_SGLANG = ("integration", "worker", "plugin", "cpu_engine", "cli.doctor")
# What code outside the package may import from it. Everything else talks to a server over HTTP.
OUTSIDE = {
    "bench.worker_rig": ("worker", "integration", "cpu_engine", "options", "drafter_config"),
    "bench.host_overhead": ("drafter.executor", "spec_types"),
    "bench.train_attention": ("layout",),
    "bench.train_attention_cases": ("layout",),
    "bench.identity_runs": ("drafter_config", "drafter.initialise"),
    "serve": ("drafter_config", "drafter.checkpoint", "drafter.initialise"),
    "train": ("drafter_config", "layout", "masks", "drafter", "verify"),
    "prune": ("drafter_config", "layout", "masks", "drafter", "verify", "reference"),
}
OUTSIDE_FOLDERS = ("bench", "serve", "train", "prune")
NEVER_SGLANG = ("train", "prune")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported_names(source: str) -> Iterator[str]:
    """Dotted names a file imports; `from a import b` gives a.b, since b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def layer_entry(name: str) -> str | None:
    """The row of LAYERS that covers a module or a name inside it; `name` is relative to d3d_sglang."""
    for key in LAYERS:
        if within(name, key.removesuffix(".*")):
            return key
    return None


def inner_problem(importer: str, imported: str) -> str | None:
    """What is wrong with one import between two files of d3d_sglang, if anything."""
    source, target = layer_entry(importer), layer_entry(imported)
    if source is None or target is None:
        return f"{importer if source is None else imported} is not in LAYERS"
    if source == target and source.endswith(".*"):
        return None
    package, other = importer.split(".")[0], imported.split(".")[0]
    if package in APART and other in APART and package != other:
        return f"{importer} imports {imported}: {', '.join(APART)} are kept apart"
    by_design = any(importer == a and within(imported, b) for a, b in UPWARD_BY_DESIGN)
    if LAYERS[target] >= LAYERS[source] and not by_design:
        return f"{importer} (layer {LAYERS[source]}) imports {imported} (layer {LAYERS[target]})"
    return None


def package_problems(importer: str, source: str, packages: set[str]) -> list[str]:
    """All broken rules of one file of d3d_sglang; `packages` are its folders, importable from anywhere."""
    problems: list[str | None] = []
    if importer not in packages and layer_entry(importer) is None:
        problems.append(f"{importer} is not in LAYERS")
    for name in imported_names(source):
        if name.startswith("."):
            problems.append(f"{importer}: relative import {name}")
        elif within(name, "sglang") and not within(importer, *MAY_IMPORT_SGLANG):
            problems.append(f"{importer} imports {name}")
        elif within(name, *OUTSIDE_FOLDERS, "tests"):
            problems.append(f"{importer} imports {name}, which is not in the wheel")
        elif within(name, PACKAGE):
            inner = name.removeprefix(PACKAGE).removeprefix(".")
            if inner not in {*packages, "__version__", "*"}:
                problems.append(inner_problem(importer, inner))
    return [problem for problem in problems if problem]


def outside_problems(importer: str, source: str) -> list[str]:
    """All broken rules of one file of bench, serve, train or prune."""
    allowed = tuple(name for key, names in OUTSIDE.items() if within(importer, key) for name in names)
    problems = []
    for name in imported_names(source):
        if within(name, PACKAGE) and not within(name, *(f"{PACKAGE}.{inner}" for inner in allowed)):
            if name not in {PACKAGE, f"{PACKAGE}.__version__"}:
                problems.append(f"{importer} imports {name}")
        if within(name, "sglang") and within(importer, *NEVER_SGLANG):
            problems.append(f"{importer} imports {name}")
    return problems


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_id(path: Path) -> str:
    return module_name(path, ROOT)


def test_imports_inside_the_package_go_down() -> None:
    root = ROOT / PACKAGE
    packages = {module_name(path, root) for path in root.rglob("__init__.py")} | {""}
    files = python_files(PACKAGE)
    assert len(files) > 10, "the package was not found"
    problems = [
        problem
        for path in files
        for problem in package_problems(module_name(path, root), path.read_text(), packages)
    ]
    assert not problems, "\n".join(problems)


def test_packages_import_nothing() -> None:
    """Otherwise importing one file of a package would load others, past the table."""
    for path in (ROOT / PACKAGE).rglob("__init__.py"):
        name = module_name(path, ROOT / PACKAGE)
        if f"{name}.*" not in LAYERS:
            assert not list(imported_names(path.read_text())), path


def test_imports_of_the_package_from_outside() -> None:
    problems = [
        problem
        for path in python_files(*OUTSIDE_FOLDERS)
        for problem in outside_problems(module_name(path, ROOT), path.read_text())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", python_files(PACKAGE, *OUTSIDE_FOLDERS, "tests", "scripts"), ids=module_id)
def test_files_are_short_and_named(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("masks", "from d3d_sglang.drafter.model import DrafterModel"),
        ("masks", "def f():\n    import d3d_sglang.worker as w"),
        ("masks", "from d3d_sglang import worker"),
        ("masks", "if TYPE_CHECKING:\n    from d3d_sglang.worker import D3DWorker"),
        ("masks", "importlib.import_module('d3d_sglang.worker')"),
        ("masks", "from .layout import PackedLayout"),
        ("masks", "import sglang.srt.server_args"),
        ("masks", "from sglang import srt"),
        ("masks", "from d3d_sglang.masks import visible"),
        ("masks", "from d3d_sglang.unheard_of import x"),
        ("masks", "from serve import smollm2"),
        ("drafter.executor", "from d3d_sglang.verify.accept import accept_block"),
        ("drafter.executor", "from d3d_sglang.branch.planner import BranchPlanner"),
        ("branch.selector", "from d3d_sglang.drafter.page_pool import PagePool"),
        ("verify.sampling", "from d3d_sglang.branch.planner import BranchPlanner"),
        ("cli.init_drafter", "import sglang"),
        ("unheard_of", "import torch"),
    ],
)
def test_the_check_sees_a_broken_rule(importer: str, source: str) -> None:
    assert package_problems(importer, source, {"", "drafter", "branch", "verify", "cli"})


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("masks", "import torch\nfrom d3d_sglang.layout import PackedLayout"),
        ("worker", "from d3d_sglang import __version__, masks\nfrom sglang.srt import x"),
        ("worker", "from d3d_sglang.integration import algorithm\nfrom d3d_sglang import drafter"),
        ("drafting", "from d3d_sglang.branch.selector import select\nfrom d3d_sglang.drafter import rows"),
        ("cpu_engine.a", "from d3d_sglang.cpu_engine import b"),
    ],
)
def test_the_check_lets_good_imports_pass(importer: str, source: str) -> None:
    assert not package_problems(importer, source, {"", "drafter", "branch"})


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("bench.client", "from d3d_sglang.worker import D3DWorker"),
        ("serve.demo", "import d3d_sglang.plugin"),
        ("train.run", "import sglang"),
        ("prune.run", "def f():\n    from sglang.srt import layers"),
    ],
)
def test_the_check_sees_a_broken_rule_outside(importer: str, source: str) -> None:
    assert outside_problems(importer, source)
