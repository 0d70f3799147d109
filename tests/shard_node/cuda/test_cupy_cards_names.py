"""That what is called of CuPy and torch is there, with the parameters it is called with. Needs no device."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import shard_node.cuda

FOLDER = Path(shard_node.cuda.__file__).parent
SOURCES = sorted(FOLDER.glob("cupy_*.py"))
ROOTS = {name: f"cupy.cuda.{name}" for name in ("compiler", "driver", "nvrtc", "runtime")} | {"cupy": "cupy"}
"""What the names that the modules import stand for."""


def dotted(node):
    """`runtime.memGetInfo` of an attribute of a name, or None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return None


def uses(roots):
    """Dotted names that begin with one of the roots, by file; and the calls of them."""
    names, calls = set(), []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = dotted(node)
            if name and "." in name and name.split(".")[0] in roots:
                names.add(name)
            if isinstance(node, ast.Call) and (called := dotted(node.func)) and called.split(".")[0] in roots:
                calls.append((called, node))
    return sorted(names), calls


def resolve(name):
    root, *rest = name.split(".")
    package, *path = ROOTS.get(root, root).split(".")
    found = importlib.import_module(package)
    for part in (*path, *rest):
        found = getattr(found, part)
    return found


def parameters(function):
    """(names of the required, names of all) of a function of Cython, which says them in its first line of help."""
    line = (function.__doc__ or "").splitlines()[0]
    inside = re.fullmatch(r"\w+\((.*)\)(?: -> .*)?", line)
    assert inside, f"{function.__name__} does not say its parameters: {line!r}"
    each = [part.strip() for part in inside[1].split(",") if part.strip()]
    names = [part.split("=")[0].split()[-1] for part in each]
    return [name for name, part in zip(names, each, strict=True) if "=" not in part], names


def test_every_name_of_cupy_is_there():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    names, _ = uses(ROOTS)
    assert "driver.launchKernel" in names
    for name in names:
        resolve(name)


def test_calls_of_runtime_and_driver_have_their_arguments():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    _, calls = uses({"driver", "runtime"})
    wrong = []
    for name, node in calls:
        function = resolve(name)
        if inspect.isclass(function):
            continue
        required, names = parameters(function)
        if node.keywords or not len(required) <= len(node.args) <= len(names):
            wrong.append((name, ast.unparse(node), names))
    assert wrong == []


def test_arguments_and_constants_are_those_of_the_driver():
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed; it needs no device for this")
    grid, block = ([f"{kind}_dim_{axis}" for axis in "xyz"] for kind in ("grid", "block"))
    for function, names in (
        (cuda.driver.launchKernel, ["f", *grid, *block, "shared_mem_bytes", "stream", "kernel_params", "extra"]),
        (cuda.runtime.memcpyAsync, ["dst", "src", "size", "kind", "stream"]),
        (cuda.runtime.memsetAsync, ["ptr", "value", "size", "stream"]),
        (cuda.runtime.streamCreateWithPriority, ["flags", "priority"]),
        (cuda.runtime.eventRecord, ["event", "stream"]),
        (cuda.runtime.streamWaitEvent, ["stream", "event", "flags"]),
        (cuda.runtime.deviceCanAccessPeer, ["device", "peerDevice"]),
        (cuda.runtime.deviceSetLimit, ["limit", "value"]),
    ):
        assert parameters(function)[1] == names
    runtime = cuda.runtime
    assert (runtime.memcpyDefault, runtime.streamNonBlocking, runtime.eventDisableTiming) == (4, 1, 2)
    assert (runtime.hostAllocPortable, runtime.hostAllocMapped, runtime.cudaLimitMaxL2FetchGranularity) == (1, 2, 5)


def test_every_name_of_torch_is_there():
    names, calls = uses({"torch"})
    assert "torch.cuda.CUDAGraph" in names
    # A torch without CUDA has only the stub of these.
    stub = Path(torch._C.__file__).parent.joinpath("_C", "__init__.pyi").read_text(encoding="utf-8")
    for name in names:
        if not name.startswith("torch._C._cuda_"):
            resolve(name)
            continue
        signature = re.search(rf"^def {name.removeprefix('torch._C.')}\(([^)]*)\) -> None: ...", stub, re.MULTILINE)
        assert signature, name
        assert {len(node.args) for called, node in calls if called == name} == {signature[1].count(": ")}
    assert all(callable(getattr(torch.cuda.CUDAGraph, name)) for name in ("capture_begin", "capture_end", "replay"))
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begin)
    assert list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)[1:3] == ["stream_ptr", "device"]
