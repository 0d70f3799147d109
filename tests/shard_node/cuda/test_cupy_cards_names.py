"""That what is called of CuPy and torch is there. Needs no device."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import shard_node.cuda

SOURCES = sorted(Path(shard_node.cuda.__file__).parent.glob("cupy_*.py"))
ROOTS = {name: f"cupy.cuda.{name}" for name in ("compiler", "driver", "nvrtc", "runtime")} | {"cupy": "cupy"}
"""What the names that the modules import stand for."""


def dotted(node: ast.AST) -> str:
    """`runtime.memGetInfo` of an attribute of a name, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return ""


def nodes_of(kind: type[ast.AST]) -> list[ast.AST]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kind)]


def names_of(roots: set[str]) -> list[str]:
    names = {dotted(node) for node in nodes_of(ast.Attribute)}
    return sorted(name for name in names if name.split(".")[0] in roots)


def resolve(name: str) -> object:
    root, *rest = name.split(".")
    package, *path = ROOTS.get(root, root).split(".")
    found = importlib.import_module(package)
    for part in (*path, *rest):
        found = getattr(found, part)
    return found


def test_every_name_of_cupy_is_there():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    names = names_of(set(ROOTS))
    assert "driver.launchKernel" in names
    for name in names:
        resolve(name)


def test_every_name_of_torch_is_there():
    names = names_of({"torch"})
    assert "torch.cuda.CUDAGraph" in names
    # A torch without CUDA has only the stub of these.
    stub = Path(torch._C.__file__).parent.joinpath("_C", "__init__.pyi").read_text(encoding="utf-8")
    for name in names:
        if not name.startswith("torch._C._cuda_"):
            resolve(name)
            continue
        signature = re.search(rf"^def {name.removeprefix('torch._C.')}\(([^)]*)\) -> None: ...", stub, re.MULTILINE)
        assert signature, name
        calls = {len(node.args) for node in nodes_of(ast.Call) if dotted(node.func) == name}
        assert calls == {signature[1].count(": ")}
    assert all(callable(getattr(torch.cuda.CUDAGraph, name)) for name in ("capture_begin", "capture_end", "replay"))
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begin)
    assert list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)[1:3] == ["stream_ptr", "device"]
