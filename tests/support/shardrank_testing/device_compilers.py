"""Compilers for real cards, which need no card themselves: nvcc, or NVRTC from its wheel."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shard_node.cuda.kernel_params import KernelSwitches

ARCHITECTURES = ("sm_80", "sm_90")
CompilerName = Literal["nvcc", "nvrtc"]
TIMEOUT_S = 100
OPTIONS_OF_CUPY = (b"-ftz=true", b"--device-as-default-execution-space")
"""That CuPy adds to those which it is given."""

_REPORT = re.compile(
    r"Function properties for (?P<kernel>\w+)\s*\n[^\n]*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill "
    r"stores, (?P<loads>\d+) bytes spill loads\s*\n[^\n]*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)


@dataclass(frozen=True)
class Resources:
    """What a kernel takes, as the assembler says: of each thread, but for shared memory, which is a thread block's."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int

    @property
    def local_bytes(self) -> int:
        """What is not in registers: 0, as it is to be."""
        return self.stack_bytes + self.spill_store_bytes + self.spill_load_bytes


def resources(
    compiler: CompilerName, source: Path, architecture: str, folder: Path, switches: KernelSwitches | None = None
) -> dict[str, Resources]:
    """Compiles for `sm_..` and reads the resource report, by kernel. Skips the test where there is no such compiler.

    Raises:
        RuntimeError: the source does not compile; with what the compiler says.
    """
    defines = (switches or KernelSwitches()).defines()
    log = _nvcc(source, architecture, folder, defines) if compiler == "nvcc" else _nvrtc(source, architecture, defines)
    return {
        found["kernel"]: Resources(
            int(found["registers"]),
            *(int(found[name]) for name in ("stack", "stores", "loads")),
            sum(map(int, re.findall(r"(\d+) bytes smem", found["rest"]))),
        )
        for found in _REPORT.finditer(log)
    }


def _nvcc(source: Path, architecture: str, folder: Path, defines: tuple[str, ...]) -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc; NVRTC compiles the same source")
    command = [
        nvcc,
        f"-arch={architecture}",
        "-std=c++17",
        *defines,
        "-Xptxas",
        "-v",
        "-cubin",
        "-o",
        str(folder / "kernels"),
    ]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=folder
    )
    if done.returncode:
        raise RuntimeError(f"nvcc can't compile {source}:\n{done.stderr}")
    return done.stderr


def _nvrtc(source: Path, architecture: str, defines: tuple[str, ...]) -> str:
    # NVRTC opens its other library by name, which is found only if it has been opened by path before.
    libraries = _nvrtc_libraries()
    held = ctypes.CDLL(str(libraries["libnvrtc-builtins"]), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(libraries["libnvrtc"]))
    program = ctypes.c_void_p()
    _ok(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), b"kernels.cu", 0, None, None))
    options = (
        f"--gpu-architecture={architecture}".encode(),
        b"-std=c++17",
        b"--ptxas-options=-v",
        *OPTIONS_OF_CUPY,
        *map(str.encode, defines),
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    _ok(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _ok(nvrtc.nvrtcGetProgramLog(program, log))
    _ok(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    del held
    if failed:
        raise RuntimeError(f"NVRTC can't compile {source}:\n{log.value.decode()}")
    return log.value.decode()


def _nvrtc_libraries() -> dict[str, Path]:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = {file.name.partition(".so")[0]: Path(str(file.locate())) for file in files if ".so" in file.name}
    if {"libnvrtc", "libnvrtc-builtins"} <= set(found):
        return found
    # The test extra names it, so that CI never goes without.
    if os.environ.get("CI"):
        raise RuntimeError("CI is set, but nvidia-cuda-nvrtc is not installed")
    pytest.skip("needs nvidia-cuda-nvrtc, which the test extra installs")


def _ok(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC: error {result}")
