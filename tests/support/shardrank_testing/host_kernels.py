"""`kernels.cu` compiled by g++, so that it runs where there is no GPU. See cuda_on_host.h.

SHARDRANK_EMULATION=address compiles with AddressSanitizer and UndefinedBehaviorSanitizer; Python must then run with
libasan preloaded. SHARDRANK_EMULATION_KERNELS names another source, to prove that a fault in it is found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import shard_node.cuda
from shard_node.cuda.kernel_params import POOL_KERNELS, THREADS_PER_BLOCK, WRITE_KERNEL

KERNEL_SOURCE = Path(shard_node.cuda.__file__).with_name("kernels.cu")
HOST_HEADER = Path(__file__).with_name("cuda_on_host.h")
KERNELS = (*POOL_KERNELS.values(), WRITE_KERNEL)
# The kernels' own pragmas mean nothing to g++.
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-Wno-unknown-pragmas")
# Checks make a unit large: -O2 takes twice the time to compile it, and finds no more.
SANITIZER_FLAGS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
MAX_PARAMS = 8
COMPILE_TIMEOUT_S = 100


class HostKernels:
    """The kernels of one shared library."""

    def __init__(self, library: Path, kernels: Sequence[str]) -> None:
        loaded = ctypes.CDLL(str(library))
        self._entries = {kernel: loaded[f"launch_{kernel}"] for kernel in kernels}
        self.param_sizes: dict[str, tuple[int, ...]] = {}
        for kernel, entry in self._entries.items():
            entry.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
            entry.restype = None
            sizes = (ctypes.c_uint * MAX_PARAMS)()
            count = loaded[f"params_of_{kernel}"](sizes)
            self.param_sizes[kernel] = tuple(sizes[:count])

    def launch(self, kernel: str, grid: tuple[int, int], params: Sequence[bytes]) -> None:
        """Gives each thread its turn, without the interpreter lock. params: each structure's bytes."""
        held = [ctypes.create_string_buffer(one, len(one)) for one in params]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self._entries[kernel](grid[0], grid[1], THREADS_PER_BLOCK, pointers)


def host_compiler() -> str:
    """Path of g++; skips the test where there is none, but not in CI, where its absence would hide all of this."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            raise RuntimeError("CI is set, but there is no g++ to compile the CUDA kernels for the host with")
        pytest.skip("needs g++, which compiles the CUDA kernels for the host")
    return compiler


def host_kernels(source: Path | None = None, kernels: tuple[str, ...] = KERNELS) -> HostKernels:
    """The kernels for this process, compiled at most once for each state of the source, with a sanitizer or without.

    source: of other kernels than the engine's.
    """
    source = source or Path(os.environ.get("SHARDRANK_EMULATION_KERNELS") or KERNEL_SOURCE)
    return _loaded(host_compiler(), source, kernels, os.environ.get("SHARDRANK_EMULATION") == "address")


@functools.cache
def _loaded(compiler: str, source: Path, kernels: tuple[str, ...], sanitized: bool) -> HostKernels:
    entries = "".join(f"CUDA_ON_HOST_KERNEL({kernel})\n" for kernel in kernels)
    unit = f'#define SHARDRANK_ON_HOST\n#include "{HOST_HEADER}"\n#include "{source}"\n{entries}'
    command = [compiler, *FLAGS, *(SANITIZER_FLAGS if sanitized else ()), "-x", "c++", "-"]
    # Not the sanitizer that this process may run under: the compiler is not to be checked.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    run = functools.partial(subprocess.run, env=environment, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    version = run([compiler, "--version"], check=True).stdout
    key = hashlib.sha256(
        b"\0".join([version, repr(command).encode(), unit.encode(), source.read_bytes(), HOST_HEADER.read_bytes()])
    ).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"shardrank-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    library = folder / f"{key[:32]}.so"
    if not library.exists():
        # Several test processes may be at it at once: each writes its own file, and the last rename wins.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as unfinished:
            made = Path(unfinished.name)
        done = run([*command, "-o", str(made)], input=unit, text=True, check=False)
        if done.returncode:
            made.unlink()
            raise RuntimeError(f"g++ can't compile {source}:\n{done.stderr}")
        made.replace(library)
    return HostKernels(library, kernels)
