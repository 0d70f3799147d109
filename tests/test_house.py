"""The tree itself: imports point left, files, functions and packages stay small, nothing is dead, words are plain."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import click
import pytest

from loader.errors import ShardrankError
from serving.cli import main

ROOT = Path(__file__).resolve().parent.parent
# Each package may import itself and what stands before it.
ORDER = ["loader", "shard_node", "router", "serving", "loadtest"]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
TEXTS_WITH_NAMES = ["README.md", "pyproject.toml", "docs", "deploy", "scripts", ".ci"]
WORDS = {
    **dict.fromkeys(["told", "tells"], "reported, passed, notified"),
    "asked": "requested, sent",
    "wanted": "desired (registry), expected",
    **dict.fromkeys(["take", "takes", "taken"], "acquire, pop, reserve, read, accept"),
    "gives": "returns, yields",
    **dict.fromkeys(["lies", "stands"], "is stored, is at"),
    "here": "local",
    "own": "nothing, or local, default",
    **dict.fromkeys(["one", "found"], "the name of the element, of the result"),
    "held": "loaded, buffered",
    "whole": "unsplit, undivided, complete",
    "place": "address, index, field path, permit",
    **dict.fromkeys(["beside", "behind"], "alongside, after, remote, lagging"),
    "out": "in flight, ejected, output",
    "turn": "loop iteration, round-robin counter",
    **dict.fromkeys(["rest", "rests"], "backoff, remainder, idle"),
    "settle": "resolve, reconcile, quiet period",
    **dict.fromkeys(["look", "looks"], "poll, read, check"),
    "most": "max",
    **dict.fromkeys(["began", "ended"], "started_at, ended_at"),
    **dict.fromkeys(["late", "dear", "reckon"], "recent, expensive, estimate"),
    "defect": "bug, internal error",
    "untaken": "unsent, unread",
    "apart": "excluded",
    **dict.fromkeys(["whoever", "nobody"], "the caller, no client"),
}
"""Words that no identifier has, and what to write instead."""
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


def lines_of(package: str) -> int:
    """Return the lines of a package's sources, kernels among them; what protoc writes is not counted."""
    files = [path for suffix in ("py", "cu", "h") for path in (ROOT / package).rglob(f"*.{suffix}")]
    return sum(len(path.read_text().splitlines()) for path in files if "_pb2" not in path.name)


@pytest.mark.parametrize("package", ORDER)
def test_a_package_keeps_to_its_lines_in_the_architecture(package):
    """A budget is moved on purpose: up with what needs it, and down when 400 lines or more are free."""
    budgets = re.findall(rf"^\| {package} \| ([\d,]+) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    budget = int(budgets[0].replace(",", ""))
    assert budget - 400 < lines_of(package) <= budget


def words_of(identifier: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, in small letters."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def bound_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines or assigns: functions, classes, arguments, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def test_files_gone_over_have_no_banned_words():
    """The list of the files that were gone over only grows: a file that has none of the words belongs in it."""
    banned = {
        relative(path): {
            name: WORDS[word] for name in bound_names(parsed(path)) for word in sorted(words_of(name) & WORDS.keys())
        }
        for path in product_files()
    }
    gone_over = set((ROOT / "tests" / "files_with_plain_words.txt").read_text().split())
    assert {path: names for path, names in banned.items() if names and path in gone_over} == {}
    assert sorted(path for path, names in banned.items() if not names) == sorted(gone_over)


def test_every_file_is_imported_or_is_a_command():
    """Entry points, benchmarks and drills are named by a string of their command's group."""
    modules = {relative(path).removesuffix(".py").replace("/", ".") for path in product_files()}
    imported = set().union(*(imported_modules(parsed(path), modules) for path in product_files()))
    strings = {
        word
        for path in (*product_files(), ROOT / "shardrank.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in re.split(r"[^\w.]", node.value)
    }
    unused = {
        name for name in modules - imported if not {name, name.rpartition(".")[2]} & {"__init__", "__main__", *strings}
    }
    # Run by a server of another project, by the name of the file.
    assert {name for name in unused if not name.startswith("loadtest.peers.servers.")} == set()


def product_files() -> list[Path]:
    return [path for path in SOURCES if not relative(path).startswith("tests")]


def test_nothing_public_is_unused():
    """A name used nowhere but where it is defined, in no document and by no framework, is dead."""
    texts = [path.read_text() for path in product_files()]
    words = Counter(re.findall(r"\w+", "\n".join(texts)))
    for name in TEXTS_WITH_NAMES:
        paths = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.*"))
        words.update(word for path in paths if path.suffix != ".png" for word in re.findall(r"\w+", path.read_text()))
    unused = [
        f"{relative(path)}:{node.name}"
        for path in product_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and words[node.name] == 1
        and not node.name.startswith("__")
        and not node.decorator_list
    ]
    # Called by a library that has these names: httptools, Triton, FastAPI, click.
    called = {"on_header", "on_body", "on_message_complete", "TritonPythonModel", "initialize", "get_route_handler"}
    called.add("format_options")
    assert [name for name in unused if name.partition(":")[2] not in called] == []


def commands_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below a group with its name."""
    if isinstance(command, click.Group):
        for name in command.list_commands(context := click.Context(command)):
            yield from commands_of(command.get_command(context, name), f"{path} {name}")
    else:
        yield path, command


def test_every_flag_is_read_by_its_command():
    """A flag's value is an argument that the command's function names in its body, or passes on with all others."""
    unread = []
    for path, command in commands_of(main, "shardrank"):
        function = inspect.unwrap(command.callback)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        arguments = {argument.arg for argument in [*tree.args.args, *tree.args.kwonlyargs]}
        read = {node.id for statement in tree.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
        unread += [f"{path}: {argument}" for argument in sorted(arguments - read)]
    assert unread == []


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
        f"{relative(path)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
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


def test_the_page_of_errors_has_every_class_and_kind_with_its_statuses():
    expected = Counter[tuple[str, str, str, str]]()
    for path in SOURCES:
        for node in parsed(path).body if not relative(path).startswith("tests") else ():
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                error = getattr(import_module(relative(path).removesuffix(".py").replace("/", ".")), node.name)
                if issubclass(error, ShardrankError):
                    expected[node.name, error.kind, str(error.http_status), error.grpc_status] += 1
                    of_kinds = vars(error).get("kinds", {}).items()
                    expected.update(("", kind, str(status), grpc) for kind, (status, grpc) in of_kinds)
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[ ·]*(?:`(\w+)`)? \| `(\w+)` \| (\d+) \| ([A-Z_]+) \| .+ \|$", page, re.MULTILINE)
    assert Counter(rows) == expected


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
