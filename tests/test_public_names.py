"""The module `shardrank`: what users import, and how little of it a client loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import shardrank

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"loader", "shard_node", "router", "serving", "loadtest"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]


def run(code: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_every_public_name_is_what_the_type_checker_is_told():
    tree = ast.parse(Path(shardrank.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [(node.module, alias.name) for node in typed.body for alias in node.names]
    for module, name in imports:
        assert getattr(shardrank, name) is getattr(import_module(module), name)
    assert sorted(name for _, name in imports) == sorted(shardrank.__all__) == sorted(set(dir(shardrank)))


def test_a_name_that_is_not_public_is_refused():
    with pytest.raises(AttributeError, match="'shardrank' has no attribute 'Arena'"):
        _ = shardrank.Arena


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "ClientError", "open_registry", "RequestLimits"])
def test_what_a_client_needs_loads_no_torch(name: str):
    assert run(f"import sys, shardrank; shardrank.{name}; print('torch' in sys.modules)") == "False\n"


def test_the_load_generator_and_the_planner_load_no_torch():
    modules = "loadtest.load.generator, router.plan, serving.cli.capacity, serving.fleet.supervisor"
    assert run(f"import sys, {modules}; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_import_from_the_public_module_only(page: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    imported = [line for block in blocks for line in block.splitlines() if re.match(r"\s*(from|import) ", line)]
    assert [line for line in imported if line.split()[1].partition(".")[0] in PACKAGES] == []
    for line in imported:
        if line.split()[1] == "shardrank":
            exec(line, {})


def test_importing_all_of_it_warns_of_nothing():
    run("import shardrank\nfor name in shardrank.__all__: getattr(shardrank, name)\nimport serving.cli", "-W", "error")


def test_the_page_of_python_names_has_each_of_them():
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`(\w+)`", page) if not name.islower() or "_" in name}
    assert named - {"http_status", "grpc_status"} == set(shardrank.__all__)
