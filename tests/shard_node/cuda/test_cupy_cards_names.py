"""That what is called of CuPy and torch is there, with the parameters it is called with. Needs no device."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
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


def test_the_modules_use_cupy_and_torch():
    names, calls = uses(ROOTS)
    assert "driver.launchKernel" in names
    assert len(calls) > 20


def test_every_name_of_cupy_is_there():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    names, _ = uses(ROOTS)
    missing = []
    for name in names:
        try:
            resolve(name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_every_call_of_the_runtime_and_the_driver_has_the_arguments_it_takes():
    pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    _, calls = uses({"driver", "runtime"})
    wrong = []
    for name, node in calls:
        function = resolve(name)
        if inspect.isclass(function):
            continue
        required, all_of_them = parameters(function)
        if node.keywords or not len(required) <= len(node.args) <= len(all_of_them):
            wrong.append((name, ast.unparse(node), all_of_them))
    assert wrong == []


def test_a_launch_passes_its_arguments_in_the_order_that_the_driver_has_them():
    cupy_cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed; it needs no device for this")
    _, names = parameters(cupy_cuda.driver.launchKernel)
    grid, block = ([f"{kind}_dim_{axis}" for axis in "xyz"] for kind in ("grid", "block"))
    assert names == ["f", *grid, *block, "shared_mem_bytes", "stream", "kernel_params", "extra"]
    _, names = parameters(cupy_cuda.runtime.memcpyAsync)
    assert names == ["dst", "src", "size", "kind", "stream"]
    _, names = parameters(cupy_cuda.runtime.memsetAsync)
    assert names == ["ptr", "value", "size", "stream"]
    _, names = parameters(cupy_cuda.runtime.streamCreateWithPriority)
    assert names == ["flags", "priority"]
    _, names = parameters(cupy_cuda.runtime.eventRecord)
    assert names == ["event", "stream"]
    _, names = parameters(cupy_cuda.runtime.streamWaitEvent)
    assert names == ["stream", "event", "flags"]
    _, names = parameters(cupy_cuda.runtime.deviceCanAccessPeer)
    assert names == ["device", "peerDevice"]
    _, names = parameters(cupy_cuda.runtime.deviceSetLimit)
    assert names == ["limit", "value"]


def test_the_numbers_of_cudas_constants_are_those_that_its_documentation_has():
    runtime = pytest.importorskip("cupy.cuda", reason="CuPy is not installed; it needs no device for this").runtime
    constants = (runtime.memcpyDefault, runtime.streamNonBlocking, runtime.eventDisableTiming)
    assert constants == (4, 1, 2)
    assert (runtime.hostAllocPortable, runtime.hostAllocMapped) == (1, 2)
    assert runtime.cudaLimitMaxL2FetchGranularity == 5


def test_what_cupy_makes_without_a_device_can_be_made_as_it_is():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; it needs no device for this")
    cupy.RawModule(code="", options=("-std=c++17",), backend="nvrtc")  # Compiles only when it is asked for a kernel.
    memory = cupy.cuda.UnownedMemory(4096, 64, object(), 0)
    array = cupy.ndarray((64,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    assert (array.data.ptr, array.nbytes, array.dtype) == (4096, 64, np.uint8)
    assert "stream=" in array.__dlpack__.__doc__


def test_every_name_of_torch_is_there():
    names, calls = uses({"torch"})
    assert "torch.cuda.CUDAGraph" in names
    # A torch without CUDA has no more of these than that they are told of.
    stub = Path(torch._C.__file__).parent.joinpath("_C", "__init__.pyi").read_text(encoding="utf-8")
    for name in names:
        if name.startswith("torch._C._cuda_"):
            said = re.search(rf"^def {name.removeprefix('torch._C.')}\(([^)]*)\) -> None: ...", stub, re.MULTILINE)
            assert said, name
            counts = {len(node.args) for called, node in calls if called == name}
            assert counts == {said[1].count(": ")}
        else:
            resolve(name)
    assert all(callable(getattr(torch.cuda.CUDAGraph, name)) for name in ("capture_begin", "capture_end", "replay"))
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begin)
    assert list(inspect.signature(torch.cuda.ExternalStream.__new__).parameters)[1:3] == ["stream_ptr", "device"]
