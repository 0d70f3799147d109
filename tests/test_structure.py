"""The shape of the tree itself: imports point left, files and functions stay small, packages say what they own."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each package may import itself and what stands before it.
ORDER = ["loader", "shard_node", "router", "serving", "loadtest"]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
SOURCES = [
    path for folder in [*ORDER, "tests"] for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name
]


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; each is looked at by several tests."""
    return ast.parse(path.read_text())


@cache
def imported_by(path: Path) -> set[str]:
    """Return the packages that a file imports, those for types alone among them."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """Return the modules of the project that a file imports, those for types alone among them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            names.update(within or {node.module})
    return names & modules


@pytest.mark.parametrize("package", ORDER)
def test_a_package_says_what_it_owns_and_imports_what_stands_to_its_left(package):
    docstring = ast.get_docstring(parsed(ROOT / package / "__init__.py"))
    assert "Owns" in docstring
    assert "ARCHITECTURE.md" in docstring
    forbidden = set(ORDER[ORDER.index(package) + 1 :]) | {"tests", "shardrank_testing"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert {relative(path): found for path in files if (found := imported_by(path) & forbidden)} == {}


@pytest.mark.parametrize("package", ORDER)
def test_no_file_imports_itself_by_way_of_others(package):
    files = {
        relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in (ROOT / package).rglob("*.py")
    }
    graph = {name: imported_modules(parsed(path), set(files)) for name, path in files.items()}
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(files)


def test_cupy_is_imported_in_one_place_at_most():
    users = [relative(path) for path in SOURCES if "cupy" in imported_by(path)]
    assert len(users) <= 1


def test_opentelemetry_is_imported_in_one_place_when_it_is_needed():
    texts = {name: path.read_text() for path in SOURCES if not (name := relative(path)).startswith("tests")}
    users = [name for name, text in texts.items() if re.search(r"^\s*(from|import) opentelemetry", text, re.MULTILINE)]
    assert users == ["shard_node/otlp.py"]
    del texts["shard_node/otlp.py"]
    # What is indented is imported when a function is called.
    assert [name for name, text in texts.items() if re.search(r"^(from|import) .*\botlp\b", text, re.MULTILINE)] == []


def test_files_are_at_most_600_lines():
    long = {relative(path): lines for path in SOURCES if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert long == {}


def test_functions_are_at_most_70_lines():
    lines = {
        f"{relative(path)}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == {}


def test_nothing_is_pickled():
    users = [relative(path) for path in SOURCES if "pickle" in imported_by(path)]
    # The metadata of torch.distributed.checkpoint is a pickle; it is read by an unpickler with a fixed list of classes.
    reader = "loader/checkpoints.py"
    assert [user for user in users if not user.startswith("tests") and user != reader] == []


def named_in_architecture() -> list[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(rf"`((?:{'|'.join(ORDER)})(?:\.\w+)+)`", text)))


@pytest.mark.parametrize("name", named_in_architecture())
def test_what_the_architecture_names_exists(name):
    found, module = None, ""
    for part in name.split("."):
        module = f"{module}.{part}".lstrip(".")
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            found = getattr(found, part)


def test_the_test_files_that_go_first_exist(request):
    order = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert [name for name in order.LONGEST if not (ROOT / "tests" / name).exists()] == []
